#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace epikv {

// What a model's two operators, epikv::block and epikv::attention, call during one forward. n: the
// packed rows of the step. An argument may change as soon as the call has returned: copy what is
// kept. May throw; the forward then throws too.
class ForwardHooks {
 public:
  virtual ~ForwardHooks() = default;

  // Entering block `layer`, and once more after the last one. residual [n, hidden]; returns what
  // the block goes on with, of the same shape and type.
  virtual at::Tensor Block(const at::Tensor& residual, int64_t layer) = 0;

  // q [n, heads, key_width], k [n, kv_heads, key_width], v [n, kv_heads, value_width], all before
  // RoPE; normed [n, hidden], the attention block's input. Returns [n, heads, value_width].
  virtual at::Tensor Attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& normed, int64_t layer) = 0;
};

// The operators epikv::block and epikv::attention. Throw outside a HooksScope.
at::Tensor EnterBlock(const at::Tensor& residual, int64_t layer);
at::Tensor Attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const at::Tensor& normed, int64_t layer);

// epikv::swiglu: gate, up [...] -> silu(gate) * up [...]
at::Tensor GatedSilu(const at::Tensor& gate, const at::Tensor& up);

// The operator epikv::rms_norm: x / rms(x) by `weight`. x [..., width], weight [width] -> as x.
// wide: by offset + weight in fp32, then narrowed; else narrowed, then by weight.
at::Tensor RmsNormed(const at::Tensor& x, const at::Tensor& weight, double eps, bool wide,
                     double offset);

// While it lives, the operators called on this thread call `hooks`. Scopes may nest.
class HooksScope {
 public:
  explicit HooksScope(ForwardHooks& hooks);
  ~HooksScope();
  HooksScope(const HooksScope&) = delete;
  HooksScope& operator=(const HooksScope&) = delete;

 private:
  ForwardHooks* const outer_;
};

}  // namespace epikv
