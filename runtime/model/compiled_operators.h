#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/model/packed_weight.h"

namespace epikv {

// Linears of one input, which one product computes: epikv_compiled::linears calls them by index.
struct Linears {
  struct Dense {
    at::Tensor weight;               // [outputs, in]
    std::optional<at::Tensor> bias;  // [outputs]
  };
  c10::intrusive_ptr<PackedWeight> packed;
  std::optional<at::Tensor> bias;  // of `packed`
  std::vector<Dense> apart;        // where LibTorch's products are as fast: `packed` is null
};

// One forward of a compiled model on this thread: while it lives, epikv_compiled::linears computes
// those of `linears`. Scopes may nest.
class CompiledForward {
 public:
  explicit CompiledForward(const std::vector<Linears>& linears);
  ~CompiledForward();
  CompiledForward(const CompiledForward&) = delete;
  CompiledForward& operator=(const CompiledForward&) = delete;

  const std::vector<Linears>& linears() const { return linears_; }
  // What an operator threw. The compiled code says only that one has failed.
  void OnThrow(std::exception_ptr thrown) { thrown_ = std::move(thrown); }
  // Throws it again; does nothing where none threw.
  void Rethrow() const {
    if (thrown_ != nullptr) std::rethrow_exception(thrown_);
  }

 private:
  const std::vector<Linears>& linears_;
  std::exception_ptr thrown_;
  CompiledForward* const outer_;
};

}  // namespace epikv
