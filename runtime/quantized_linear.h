#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <optional>

#include "runtime/quantized_matmul.h"

namespace epikv {

// A weight of epikv::quantized_linear as this machine multiplies it. A constant of a graph:
// immutable, shared by all threads.
class PackedQuantizedWeight : public torch::CustomClassHolder {
 public:
  // weight: int8 [out, in], or of 4 bits uint8 [out, in / 2]; scale: bfloat16 [out, groups]. Throws
  // c10::Error, naming what they are not.
  PackedQuantizedWeight(const at::Tensor& weight, const at::Tensor& scale);

  // x [..., in] -> [..., out], of x's dtype.
  at::Tensor Apply(const at::Tensor& x, const std::optional<at::Tensor>& bias) const;

  // The weight that it stands for, [out, in].
  at::Tensor Dense(at::ScalarType dtype) const;

  int64_t bytes() const { return PackedWeightBytes(shape_); }
  const QuantizedShape& shape() const { return shape_; }

 private:
  const QuantizedShape shape_;
  at::Tensor packed_;  // uint8
};

}  // namespace epikv
