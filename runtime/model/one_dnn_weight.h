#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "runtime/model/packed_weight.h"

namespace epikv {

// As this machine's oneDNN kernels read it.
class OneDnnWeight final : public PackedWeight {
 public:
  // Whether this LibTorch's oneDNN multiplies such weights on this processor.
  static bool Supports(at::ScalarType dtype);

  // weight: float32 or bfloat16 [out, in].
  explicit OneDnnWeight(const at::Tensor& weight);

  at::Tensor Apply(const at::Tensor& x, const std::optional<at::Tensor>& bias) const override;
  at::ScalarType bias_dtype() const override { return dtype_; }
  at::Tensor Dense(at::ScalarType dtype) const override;
  int64_t bytes() const override;
  absl::string_view kernels() const override { return "oneDNN"; }

 private:
  const int64_t in_;
  const int64_t out_;
  const at::ScalarType dtype_;
  at::Tensor packed_;
};

}  // namespace epikv
