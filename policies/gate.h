#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace epikv {

// A small model beside the served one. It tells at a token's birth, from what each layer's
// attention is given, a number for each KV head, or several. Immutable.
class Gate {
 public:
  virtual ~Gate() = default;

  virtual int64_t numbers() const { return 1; }  // of each KV head

  // input: [n, hidden], rows of the residual stream as the layer's norm leaves them, in the model's
  // dtype, on the model's device. Returns fp32 [n, kv_heads x numbers] there, a head's numbers side
  // by side. A row's bits depend on its own channels and on n.
  virtual at::Tensor Apply(int64_t layer, const at::Tensor& input) const = 0;
};

}  // namespace epikv
