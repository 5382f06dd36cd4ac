#include "runtime/operators.h"

#include <torch/library.h>

namespace epikv {
namespace {

thread_local ForwardHooks* current_hooks = nullptr;

ForwardHooks& Hooks(const char* name) {
  TORCH_CHECK(current_hooks != nullptr, "epikv::", name,
              " was called outside a forward on this thread: run the model through epikv::Model");
  return *current_hooks;
}

at::Tensor Block(const at::Tensor& residual, int64_t layer) {
  return Hooks("block").Block(residual, layer);
}

at::Tensor Attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& normed, int64_t layer) {
  return Hooks("attention").Attention(q, k, v, normed, layer);
}

}  // namespace

HooksScope::HooksScope(ForwardHooks& hooks) : outer_(current_hooks) { current_hooks = &hooks; }

HooksScope::~HooksScope() { current_hooks = outer_; }

}  // namespace epikv

// The same schemas as in tools/epikv/export/operators.py. `block` may return its argument, so the
// schema says that they alias. `attention` writes the KV cache, which no schema can say:
// CONSERVATIVE is how the compiler is told never to merge, move, delete or evaluate a call.
TORCH_LIBRARY(epikv, m) {
  m.def("block(Tensor(a) residual, int layer) -> Tensor(a)");
  m.def(torch::schema("attention(Tensor q, Tensor k, Tensor v, Tensor normed, int layer) -> Tensor",
                      c10::AliasAnalysisKind::CONSERVATIVE));
  m.impl("block", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(epikv::Block));
  m.impl("attention", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(epikv::Attention));
}
