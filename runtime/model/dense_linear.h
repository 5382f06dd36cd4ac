#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "runtime/base/huge_pages.h"
#include "runtime/kernels/dense_matmul.h"
#include "runtime/model/packed_weight.h"

namespace epikv {

class PackedDenseWeight final : public PackedWeight {
 public:
  // weight: float32 or bfloat16 [out, in]. Precondition: FastestDensePath(its dtype) has a value.
  PackedDenseWeight(const at::Tensor& weight, WeightArena& arena);

  at::Tensor Apply(const at::Tensor& x, const std::optional<at::Tensor>& bias) const override;
  at::ScalarType bias_dtype() const override { return at::kFloat; }
  at::Tensor Dense(at::ScalarType dtype) const override;
  int64_t bytes() const override { return PackedDenseBytes(shape_); }
  absl::string_view kernels() const override { return DensePathName(path_); }

 private:
  const DenseShape shape_;
  const DensePath path_;
  const std::shared_ptr<char> packed_;
};

}  // namespace epikv
