#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "runtime/base/huge_pages.h"
#include "runtime/kernels/quantized_matmul.h"
#include "runtime/model/packed_weight.h"

namespace epikv {

// A weight of epikv::quantized_linear.
class PackedQuantizedWeight final : public PackedWeight {
 public:
  // weight: int8 [out, in], or of 4 bits uint8 [out, in / 2]; scale: bfloat16 [out, groups]. Throws
  // c10::Error, naming what they are not.
  PackedQuantizedWeight(const at::Tensor& weight, const at::Tensor& scale, WeightArena& arena);

  at::Tensor Apply(const at::Tensor& x, const std::optional<at::Tensor>& bias) const override;
  at::ScalarType bias_dtype() const override { return at::kFloat; }
  at::Tensor Dense(at::ScalarType dtype) const override;
  int64_t bytes() const override { return PackedWeightBytes(shape_); }
  absl::string_view kernels() const override {
    return QuantizedPathName(FastestQuantizedPath(shape_));
  }

 private:
  const QuantizedShape shape_;
  const std::shared_ptr<char> packed_;
};

}  // namespace epikv
