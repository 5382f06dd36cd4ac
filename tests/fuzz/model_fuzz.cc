// A model file: it is refused with a reason, or serves. Files are damaged as they are, which
// checksums find, and inside (model_mutator.cc), as by a program that writes other files than ours.
// The code in a model file is a program all the same: whoever may load models may run what they
// like.

#include <memory>
#include <string>

#include "runtime/model/model.h"
#include "runtime/text/utf8.h"
#include "tests/fuzz/memory_file.h"
#include "tests/fuzz/require.h"

namespace epikv {
namespace {

void CheckFile(absl::string_view bytes) {
  static auto& file = *new MemoryFile;
  const absl::StatusOr<std::unique_ptr<Model>> model = LoadTorchScript(file.With(bytes));
  if (model.ok()) {
    Require((*model)->manifest().num_layers() > 0, "what serves has layers");
    return;
  }
  const std::string error = model.status().ToString();
  Require(!model.status().message().empty(), "an error has a text", error);
  Require(!FirstInvalidUtf8(model.status().message()).has_value(), "which can be told", error);
  Require(absl::IsDataLoss(model.status()) || absl::IsFailedPrecondition(model.status()) ||
              absl::IsInvalidArgument(model.status()) || absl::IsUnimplemented(model.status()) ||
              absl::IsResourceExhausted(model.status()),
          "it is the file's fault", error);
}

}  // namespace
}  // namespace epikv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  epikv::CheckFile({reinterpret_cast<const char*>(data), size});
  return 0;
}
