#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <optional>

#include "absl/strings/string_view.h"

namespace epikv {

// The weight of a linear as this machine multiplies it. A constant of a graph: immutable, shared by
// all threads.
class PackedWeight : public torch::CustomClassHolder {
 public:
  // x [..., in] -> [..., out], of x's dtype. bias [out], of `bias_dtype`. Throws c10::Error, naming
  // what x is not.
  virtual at::Tensor Apply(const at::Tensor& x, const std::optional<at::Tensor>& bias) const = 0;
  virtual at::ScalarType bias_dtype() const = 0;

  // What it was packed from, [out, in]: bit for bit, or what its integers stand for, in a dtype.
  virtual at::Tensor Dense(at::ScalarType dtype) const = 0;
  virtual int64_t bytes() const = 0;
  // Whose products they are, in words.
  virtual absl::string_view kernels() const = 0;
};

}  // namespace epikv
