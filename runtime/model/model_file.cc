#include "runtime/model/model_file.h"

#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <new>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "runtime/base/checksums.h"
#include "runtime/model/loaders.h"
#include "runtime/text/utf8.h"

namespace epikv {
namespace {

// It quotes names of the file, which may be any bytes, as Broken does.
absl::Status Damaged(const std::string& path, absl::string_view what) {
  return absl::DataLossError(ValidUtf8(
      absl::StrCat(path, " is damaged, or is not a TorchScript file: ", what,
                   " (a Hugging Face directory or checkpoint: run `epikv export` first)")));
}

}  // namespace

std::string FirstSentence(absl::string_view what) {
  const absl::string_view line = what.substr(0, what.find('\n'));
  return std::string(line.substr(0, line.find(". ")));
}

absl::Status Broken(const std::string& path, const std::vector<std::string>& violations) {
  return absl::FailedPreconditionError(
      ValidUtf8(absl::StrCat(path, " breaks the model contract: ", absl::StrJoin(violations, "; "),
                             ". Export it again with `epikv export`")));
}

// LibTorch has a type of its own for this on GPUs only.
bool IsOutOfMemory(const std::exception& error) {
  return dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
         dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
         absl::StrContains(error.what(), "DefaultCPUAllocator");
}

absl::Status OutOfMemory(const std::string& path) {
  return absl::ResourceExhaustedError(
      absl::StrCat("not enough memory to load ", path,
                   ": the weights need about as much memory as the file has bytes"));
}

absl::Status CannotLoad(const std::string& path, const std::exception& error) {
  if (IsOutOfMemory(error)) return OutOfMemory(path);
  return Broken(path, {absl::StrCat("LibTorch ", EPIKV_TORCH_VERSION,
                                    " cannot load it: ", FirstSentence(error.what()))});
}

absl::StatusOr<std::string> ReadExtra(caffe2::serialize::PyTorchStreamReader& reader,
                                      const std::string& name) {
  if (!reader.hasRecord("extra/" + name)) {
    return absl::NotFoundError(absl::StrCat("the file has no ", name));
  }
  const auto [data, size] = reader.getRecord("extra/" + name);
  return std::string(static_cast<const char*>(data.get()), size);
}

std::vector<std::string> ReadTexts(caffe2::serialize::PyTorchStreamReader& reader,
                                   ModelTexts& texts) {
  std::vector<std::string> violations;
  const absl::StatusOr<std::string> json = ReadExtra(reader, "manifest.json");
  if (!json.ok()) {
    violations.emplace_back(json.status().message());
  } else if (absl::StatusOr<Manifest> manifest = Manifest::Parse(*json); manifest.ok()) {
    texts.manifest = *std::move(manifest);
  } else {
    violations.emplace_back(manifest.status().message());
  }
  absl::StatusOr<std::string> tokenizer = ReadExtra(reader, "tokenizer.json");
  if (!tokenizer.ok()) {
    violations.emplace_back(tokenizer.status().message());
  } else if (!nlohmann::json::accept(*tokenizer)) {
    violations.emplace_back("its tokenizer.json is not JSON");
  } else {
    texts.tokenizer_json = *std::move(tokenizer);
  }
  absl::StatusOr<std::string> chat = ReadExtra(reader, "chat.json");  // older files have none
  if (chat.ok()) texts.chat_json = *std::move(chat);
  absl::StatusOr<std::string> chat_template = ReadExtra(reader, "chat_template.json");  // nor these
  if (chat_template.ok()) texts.chat_template_json = *std::move(chat_template);
  return violations;
}

ModelFacts FactsOf(ModelTexts texts) {
  return {.manifest = std::move(texts.manifest),
          .tokenizer_json = std::move(texts.tokenizer_json),
          .chat_json = std::move(texts.chat_json),
          .chat_template_json = std::move(texts.chat_template_json)};
}

at::Tensor FileModel::output_projection(int64_t layer) const {
  return named_.output_projections.at(layer)();
}

at::Tensor FileModel::FinalNormed(const at::Tensor& residual) const {
  const FinalNorm& norm = manifest().final_norm.value();
  return RmsNormed(residual, named_.final_norm, norm.eps, norm.wide, norm.offset);
}

absl::Status CheckArchive(const std::string& path) {
  if (!std::ifstream(path)) {
    return absl::Status(absl::ErrnoToStatusCode(errno),
                        absl::StrCat("cannot open ", path, ": ", std::strerror(errno)));
  }
  try {
    caffe2::serialize::PyTorchStreamReader reader(path);
    const absl::Status status = VerifyChecksums(reader, path);
    return status.ok() ? status : Damaged(path, status.message());
  } catch (const std::exception& error) {
    if (IsOutOfMemory(error)) return OutOfMemory(path);
    return Damaged(path, FirstSentence(error.what()));
  }
}

absl::StatusOr<std::unique_ptr<Model>> LoadModelFile(const std::string& path,
                                                     const ModelOptions& options) {
  if (absl::Status status = CheckArchive(path); !status.ok()) return status;
  try {
    caffe2::serialize::PyTorchStreamReader reader(path);
    if (IsCompiled(reader)) return LoadCompiled(path, options);
  } catch (const std::exception& error) {
    return CannotLoad(path, error);
  }
  return LoadTorchScript(path, options);
}

}  // namespace epikv
