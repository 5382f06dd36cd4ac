#pragma once

#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/model/manifest.h"
#include "runtime/model/model.h"

namespace caffe2::serialize {
class PyTorchStreamReader;
}

// What model files of every kind have, and how their faults are told.

namespace epikv {

struct ModelTexts {
  Manifest manifest;
  std::string tokenizer_json;
  std::string chat_json;           // empty: the file is older than chat formats
  std::string chat_template_json;  // empty: the file has none
};

// What a model says of itself by these; the rest is for its loader to say.
ModelFacts FactsOf(ModelTexts texts);

// Weights that the manifest names.
struct NamedWeights {
  std::vector<std::function<at::Tensor()>> output_projections;  // [layers]
  at::Tensor final_norm;  // undefined: the manifest names none
};

// A model of a file of any kind.
class FileModel : public Model {
 public:
  FileModel(ModelFacts facts, NamedWeights named)
      : Model(std::move(facts)), named_(std::move(named)) {}

  at::Tensor output_projection(int64_t layer) const override;
  at::Tensor FinalNormed(const at::Tensor& residual) const override;

 private:
  const NamedWeights named_;
};

// Opens the archive and compares its checksums. Throws no exceptions.
absl::Status CheckArchive(const std::string& path);

// An extra file of the archive. NOT_FOUND: there is none of this name.
absl::StatusOr<std::string> ReadExtra(caffe2::serialize::PyTorchStreamReader& reader,
                                      const std::string& name);
// Reads what stands beside the weights; returns what is wrong with it.
std::vector<std::string> ReadTexts(caffe2::serialize::PyTorchStreamReader& reader,
                                   ModelTexts& texts);

// FAILED_PRECONDITION: the file breaks the model contract.
absl::Status Broken(const std::string& path, const std::vector<std::string>& violations);
// RESOURCE_EXHAUSTED.
absl::Status OutOfMemory(const std::string& path);
bool IsOutOfMemory(const std::exception& error);
// Of what the loader threw.
absl::Status CannotLoad(const std::string& path, const std::exception& error);

// Of an exception's text: torch adds guesses and traces.
std::string FirstSentence(absl::string_view what);

}  // namespace epikv
