#include "server/models/model_files.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "runtime/text/utf8.h"
#include "server/base/sha256.h"

namespace epikv {
namespace {

namespace fs = std::filesystem;

absl::Status CannotRead(const std::string& path, int error) {
  return absl::ErrnoToStatus(error, ValidUtf8(absl::StrCat("cannot read ", path)));
}

absl::StatusOr<fs::path> Resolve(const std::string& path) {
  std::error_code error;
  fs::path resolved = fs::canonical(path, error);
  if (error) return CannotRead(path, error.value());
  return resolved;
}

absl::StatusOr<std::string> DigestOf(const std::string& path) {
  Sha256 digest;
  std::ifstream file(path, std::ios::binary);
  std::vector<char> part(1 << 20);
  while (file.read(part.data(), static_cast<std::streamsize>(part.size())) || file.gcount() > 0) {
    digest.Add({part.data(), static_cast<size_t>(file.gcount())});
  }
  if (!file.eof()) return CannotRead(path, errno);
  return digest.Name();
}

}  // namespace

std::vector<std::string> SplitDigests(absl::string_view text) {
  return absl::StrSplit(text, absl::ByAnyChar(", \t\n"), absl::SkipEmpty());
}

bool IsDigest(absl::string_view text) {
  return absl::ConsumePrefix(&text, "sha256:") && text.size() == 64 &&
         absl::c_all_of(text, [](char c) {
           return absl::ascii_isdigit(static_cast<unsigned char>(c)) || (c >= 'a' && c <= 'f');
         });
}

absl::StatusOr<std::string> ResolveIn(const std::string& root, const std::string& path) {
  if (root.empty()) return path;
  const absl::StatusOr<fs::path> folder = Resolve(root), resolved = Resolve(path);
  if (!folder.ok()) return folder.status();
  if (!resolved.ok()) return resolved.status();
  const auto [end, unused] =
      std::mismatch(folder->begin(), folder->end(), resolved->begin(), resolved->end());
  if (end != folder->end()) {
    return absl::PermissionDeniedError(
        ValidUtf8(absl::StrCat(path, " is not in model_root, which is ", root)));
  }
  return resolved->string();
}

absl::StatusOr<ModelFile> ModelFile::Check(const std::string& path, const ModelFileRules& rules) {
  ModelFile file;
  absl::StatusOr<std::string> resolved = ResolveIn(rules.root, path);
  if (!resolved.ok()) return resolved.status();
  file.path_ = *std::move(resolved);
  file.version_ = VersionOf(file.path_);
  if (rules.digests.empty()) return file;
  const absl::StatusOr<std::string> digest = DigestOf(file.path_);
  if (!digest.ok()) return digest.status();
  if (!absl::c_linear_search(rules.digests, *digest)) {
    return absl::FailedPreconditionError(ValidUtf8(
        absl::StrCat(path, " has the digest ", *digest, ", which is not in model_digests")));
  }
  return file;
}

absl::Status ModelFile::CheckUnchanged() const {
  if (VersionOf(path_) == version_) return absl::OkStatus();
  return absl::AbortedError(
      ValidUtf8(absl::StrCat(path_, " was changed while it was loaded; load it again")));
}

}  // namespace epikv
