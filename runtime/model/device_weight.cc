#include "runtime/model/device_weight.h"

#include <ATen/ATen.h>

namespace epikv {

DeviceWeight::DeviceWeight(const at::Tensor& weight, at::Device device)
    : weight_(weight.detach().to(device)) {}

at::Tensor DeviceWeight::Apply(const at::Tensor& x, const std::optional<at::Tensor>& bias) const {
  return at::linear(x, weight_, bias);
}

at::Tensor DeviceWeight::Dense(at::ScalarType dtype) const { return weight_.to(dtype); }

}  // namespace epikv
