#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "runtime/bfloat16_matmul.h"
#include "runtime/packed_weight.h"

namespace epikv {

class PackedBFloat16Weight final : public PackedWeight {
 public:
  // weight: bfloat16 [out, in]. Precondition: FastestBFloat16Path() has a value.
  explicit PackedBFloat16Weight(const at::Tensor& weight);

  at::Tensor Apply(const at::Tensor& x, const std::optional<at::Tensor>& bias) const override;
  at::ScalarType bias_dtype() const override { return at::kFloat; }
  at::Tensor Dense(at::ScalarType dtype) const override;
  int64_t bytes() const override { return PackedBFloat16Bytes(shape_); }
  absl::string_view kernels() const override { return BFloat16PathName(path_); }

 private:
  const BFloat16Path path_;
  const BFloat16Shape shape_;
  at::Tensor packed_;  // uint8
};

}  // namespace epikv
