#include "runtime/model/operators.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>

#include "runtime/base/scalar_type.h"
#include "runtime/kernels/kernels.h"

namespace epikv {
namespace {

thread_local ForwardHooks* current_hooks = nullptr;

ForwardHooks& Hooks(const char* name) {
  TORCH_CHECK(current_hooks != nullptr, "epikv::", name,
              " was called outside a forward on this thread: run the model through epikv::Model");
  return *current_hooks;
}

// Two that a model may call instead of several of torch's, each of which costs as much as a small
// tensor's arithmetic.

constexpr int64_t kGrain = 32768;  // elements that are worth a thread

bool HasKernel(const at::Tensor& x) {
  return x.device().is_cpu() && (x.scalar_type() == at::kFloat ||
                                 x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf);
}

// As torch's own operators say it: of other types, and weights wider than x.
at::Tensor PlainRmsNorm(const at::Tensor& x, const at::Tensor& weight, double eps, bool wide,
                        double offset) {
  const at::Tensor of = x.to(at::kFloat);
  const at::Tensor normed = of * at::rsqrt(of.pow(2).mean(-1, /*keepdim=*/true) + eps);
  if (wide) return ((weight.to(at::kFloat) + offset) * normed).to(x.scalar_type());
  return weight * normed.to(x.scalar_type());
}

// x as rows whose elements lie beside each other, at any distance: [rows, width].
at::Tensor AsRows(const at::Tensor& x) {
  const at::Tensor rows = x.dim() == 2 ? x : x.reshape({-1, x.size(-1)});
  return rows.stride(1) == 1 || rows.size(1) == 1 ? rows : rows.contiguous();
}

}  // namespace

at::Tensor EnterBlock(const at::Tensor& residual, int64_t layer) {
  return Hooks("block").Block(residual, layer);
}

at::Tensor Attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const at::Tensor& normed, int64_t layer) {
  return Hooks("attention").Attention(q, k, v, normed, layer);
}

at::Tensor GatedSilu(const at::Tensor& gate, const at::Tensor& up) {
  TORCH_CHECK(gate.sizes() == up.sizes(), "epikv::swiglu: gate is ", gate.sizes(), ", up ",
              up.sizes());
  if (!HasKernel(gate) || gate.scalar_type() != up.scalar_type() || gate.dim() == 0) {
    return at::silu(gate) * up;
  }
  at::Tensor out = at::empty(gate.sizes(), gate.options());
  if (gate.numel() == 0) return out;
  const at::Tensor a = AsRows(gate), b = AsRows(up);  // which are two parts of one product
  const int64_t size = static_cast<int64_t>(a.element_size()), width = a.size(1);
  const auto* const gates = static_cast<const char*>(a.const_data_ptr());
  const auto* const ups = static_cast<const char*>(b.const_data_ptr());
  auto* const to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t a_bytes = a.stride(0) * size, b_bytes = b.stride(0) * size;
  // One row of a step may be worth several threads.
  at::parallel_for(0, a.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end;) {
      const int64_t row = at / width, from = at % width, count = std::min(end - at, width - from);
      SwiGlu(gates + row * a_bytes + from * size, ups + row * b_bytes + from * size, to + at * size,
             count, DTypeOf(gate.scalar_type()));
      at += count;
    }
  });
  return out;
}

HooksScope::HooksScope(ForwardHooks& hooks) : outer_(current_hooks) { current_hooks = &hooks; }

HooksScope::~HooksScope() { current_hooks = outer_; }

at::Tensor RmsNormed(const at::Tensor& x, const at::Tensor& weight, double eps, bool wide,
                     double offset) {
  TORCH_CHECK(x.dim() > 0 && weight.dim() == 1 && weight.size(0) == x.size(-1),
              "epikv::rms_norm: x is ", x.sizes(), ", the weight ", weight.sizes());
  // One kernel in place of eight; the weight is multiplied before it is rounded, not after.
  if (x.is_cuda() && !wide) return at::rms_norm(x, x.size(-1), weight, eps);
  if (!HasKernel(x) || weight.scalar_type() != x.scalar_type()) {
    return PlainRmsNorm(x, weight, eps, wide, offset);
  }
  const at::Tensor in = x.contiguous(), by = weight.contiguous();
  at::Tensor out = at::empty_like(in);
  const int64_t width = x.size(-1);
  if (x.numel() == 0) return out;
  const RmsNormKind kind = {
      .eps = static_cast<float>(eps), .wide = wide, .offset = static_cast<float>(offset)};
  const auto* const from = static_cast<const char*>(in.const_data_ptr());
  auto* const to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t row = width * static_cast<int64_t>(x.element_size());
  at::parallel_for(0, x.numel() / width, std::max<int64_t>(1, kGrain / width),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t i = begin; i < end; ++i) {
                       RmsNorm(from + i * row, by.const_data_ptr(), to + i * row, width, kind,
                               DTypeOf(x.scalar_type()));
                     }
                   });
  return out;
}

}  // namespace epikv

// The same schemas as in tools/epikv/export/operators.py. `block` may return its argument, so the
// schema says that they alias. `attention` writes the KV cache, which no schema can say:
// CONSERVATIVE is how the compiler is told never to merge, move, delete or evaluate a call.
TORCH_LIBRARY(epikv, m) {
  m.def("block(Tensor(a) residual, int layer) -> Tensor(a)");
  m.def(torch::schema("attention(Tensor q, Tensor k, Tensor v, Tensor normed, int layer) -> Tensor",
                      c10::AliasAnalysisKind::CONSERVATIVE));
  m.impl("block", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(epikv::EnterBlock));
  m.impl("attention", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(epikv::Attend));
  m.def("rms_norm(Tensor x, Tensor weight, float eps, bool wide=False, float offset=0.) -> Tensor");
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.impl("rms_norm", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(epikv::RmsNormed));
  m.impl("swiglu", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(epikv::GatedSilu));
}
