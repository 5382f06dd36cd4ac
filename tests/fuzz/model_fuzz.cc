// A model file: it is refused with a reason, or serves. Files are damaged as they are, which
// checksums find, and inside (model_mutator.cc), as by a program that writes other files than ours:
// weights, objects, and code, to which calls are added that no model file may make. The forward
// that ends loading is watched: operators on tensors here, as LibTorch calls them; files that are
// opened, and other machines, by strace (fuzz.sh).

#include <ATen/record_function.h>

#include <memory>
#include <string>
#include <utility>

#include "runtime/model/allowed_operators.h"
#include "runtime/model/model.h"
#include "runtime/text/utf8.h"
#include "tests/fuzz/memory_file.h"
#include "tests/fuzz/require.h"

namespace epikv {
namespace {

// Operators on tensors that code of model files calls itself; what those call is LibTorch's.
class CalledByCode {
 public:
  static void Watch() {
    at::addGlobalCallback(
        at::RecordFunctionCallback(&Begin, &End)
            .scopes({at::RecordScope::FUNCTION, at::RecordScope::TORCHSCRIPT_FUNCTION}));
  }

  // Called since they were taken last.
  static int64_t Take() { return std::exchange(calls_, 0); }

 private:
  static std::unique_ptr<at::ObserverContext> Begin(const at::RecordFunction& called) {
    if (called.scope() == at::RecordScope::TORCHSCRIPT_FUNCTION) {
      ++functions_;
    } else if (functions_ > 0 && operators_++ == 0) {
      ++calls_;
      Require(OperatorIsAllowed(called.name()), "the code calls what it may", called.name());
    }
    return nullptr;
  }
  static void End(const at::RecordFunction& called, at::ObserverContext*) {
    if (called.scope() == at::RecordScope::TORCHSCRIPT_FUNCTION) {
      --functions_;
    } else if (functions_ > 0) {
      --operators_;
    }
  }

  static thread_local int64_t functions_, operators_, calls_;  // running; running; so far
};

thread_local int64_t CalledByCode::functions_ = 0;
thread_local int64_t CalledByCode::operators_ = 0;
thread_local int64_t CalledByCode::calls_ = 0;

void CheckFile(absl::string_view bytes) {
  static auto& file = *new MemoryFile;
  CalledByCode::Take();
  const absl::StatusOr<std::unique_ptr<Model>> model = LoadModelFile(file.With(bytes));
  const int64_t calls = CalledByCode::Take();
  if (model.ok()) {
    Require((*model)->manifest().num_layers() > 0, "what serves has layers");
    Require(calls > 0, "its forward was watched");
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
  static const bool watched = [] {
    epikv::CalledByCode::Watch();
    return true;
  }();
  (void)watched;
  epikv::CheckFile({reinterpret_cast<const char*>(data), size});
  return 0;
}
