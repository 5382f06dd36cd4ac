#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "runtime/bfloat16_matmul.h"
#include "runtime/huge_pages.h"
#include "runtime/packed_weight.h"

namespace epikv {

class PackedBFloat16Weight final : public PackedWeight {
 public:
  // weight: bfloat16 [out, in]. Precondition: FastestBFloat16Path() has a value.
  PackedBFloat16Weight(const at::Tensor& weight, WeightArena& arena);

  at::Tensor Apply(const at::Tensor& x, const std::optional<at::Tensor>& bias) const override;
  at::ScalarType bias_dtype() const override { return at::kFloat; }
  at::Tensor Dense(at::ScalarType dtype) const override;
  int64_t bytes() const override { return PackedBFloat16Bytes(shape_); }
  absl::string_view kernels() const override { return BFloat16PathName(path_); }

 private:
  const BFloat16Path path_;
  const BFloat16Shape shape_;
  const std::shared_ptr<char> packed_;
};

}  // namespace epikv
