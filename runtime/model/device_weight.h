#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "runtime/model/packed_weight.h"

namespace epikv {

// As it is, on a device, whose own library multiplies.
class DeviceWeight final : public PackedWeight {
 public:
  // weight: [out, in].
  DeviceWeight(const at::Tensor& weight, at::Device device);

  at::Tensor Apply(const at::Tensor& x, const std::optional<at::Tensor>& bias) const override;
  at::ScalarType bias_dtype() const override { return weight_.scalar_type(); }
  at::Tensor Dense(at::ScalarType dtype) const override;
  int64_t bytes() const override { return static_cast<int64_t>(weight_.nbytes()); }
  absl::string_view kernels() const override { return "the device"; }

 private:
  const at::Tensor weight_;
};

}  // namespace epikv
