#include "runtime/model/compiled_operators.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <numeric>

#include "runtime/model/operators.h"

namespace epikv {
namespace {

thread_local CompiledForward* current = nullptr;

// A result as the compiler planned it: of this shape and type, contiguous (the fakes in
// tools/epikv/export/compiled.py), in memory that no argument has, which it may write to as soon as
// it thinks that nobody needs the argument.
at::Tensor AsPlanned(const char* name, const at::Tensor& result, const at::Tensor& argument,
                     at::IntArrayRef shape, at::ScalarType type) {
  TORCH_CHECK(result.sizes() == shape && result.scalar_type() == type, "epikv_compiled::", name,
              ": the result is ", result.scalar_type(), " ", result.sizes(), ", not ", type, " ",
              shape);
  if (result.is_alias_of(argument)) return result.clone(at::MemoryFormat::Contiguous);
  return result.contiguous();
}
at::Tensor AsPlanned(const char* name, const at::Tensor& result, const at::Tensor& like) {
  return AsPlanned(name, result, like, like.sizes(), like.scalar_type());
}

// Runs an operator, and keeps what it throws for whoever runs the model.
template <class Run>
auto Watched(const Run& run) {
  try {
    return run();
  } catch (...) {
    if (current != nullptr) current->OnThrow(std::current_exception());
    throw;
  }
}

at::Tensor CompiledBlock(const at::Tensor& residual, int64_t layer) {
  return Watched([&] { return AsPlanned("block", EnterBlock(residual, layer), residual); });
}

at::Tensor CompiledAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const at::Tensor& normed, int64_t layer) {
  return Watched([&] {
    return AsPlanned("attention", Attend(q, k, v, normed, layer), v,
                     {q.size(0), q.size(1), v.size(2)}, q.scalar_type());
  });
}

at::Tensor CompiledRmsNorm(const at::Tensor& x, const at::Tensor& weight, double eps, bool wide,
                           double offset) {
  return Watched([&] { return AsPlanned("rms_norm", RmsNormed(x, weight, eps, wide, offset), x); });
}

at::Tensor CompiledSwiGlu(const at::Tensor& gate, const at::Tensor& up) {
  return Watched([&] { return AsPlanned("swiglu", GatedSilu(gate, up), gate); });
}

at::Tensor Apart(const at::Tensor& x, const std::vector<Linears::Dense>& linears) {
  std::vector<at::Tensor> parts;
  parts.reserve(linears.size());
  for (const Linears::Dense& linear : linears) {
    parts.push_back(at::linear(x, linear.weight, linear.bias));
  }
  return parts.size() == 1 ? parts[0] : at::cat(parts, -1);
}

std::vector<at::Tensor> Product(const at::Tensor& x, int64_t index, at::IntArrayRef outputs) {
  TORCH_CHECK(current != nullptr,
              "epikv_compiled::linears was called outside a forward of a compiled model");
  const std::vector<Linears>& all = current->linears();
  TORCH_CHECK(index >= 0 && index < static_cast<int64_t>(all.size()),
              "epikv_compiled::linears: the model has ", all.size(), " products, and no index ",
              index);
  const Linears& linears = all[index];
  const at::Tensor product =
      linears.packed ? linears.packed->Apply(x, linears.bias) : Apart(x, linears.apart);
  const int64_t wanted = std::accumulate(outputs.begin(), outputs.end(), int64_t{0});
  TORCH_CHECK(product.size(-1) == wanted, "epikv_compiled::linears: product ", index, " has ",
              product.size(-1), " outputs, not ", wanted);
  return product.contiguous().split_with_sizes(outputs, -1);
}

// x [..., in] -> [..., outputs[i]] each, parts of one tensor.
std::vector<at::Tensor> CompiledLinears(const at::Tensor& x, int64_t index,
                                        at::IntArrayRef outputs) {
  return Watched([&] { return Product(x, index, outputs); });
}

}  // namespace

CompiledForward::CompiledForward(const std::vector<Linears>& linears)
    : linears_(linears), outer_(current) {
  current = this;
}

CompiledForward::~CompiledForward() { current = outer_; }

}  // namespace epikv

// The same schemas as in tools/epikv/export/compiled.py.
TORCH_LIBRARY(epikv_compiled, m) {
  m.def("block(Tensor residual, int layer) -> Tensor");
  m.def("attention(Tensor q, Tensor k, Tensor v, Tensor normed, int layer) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, bool wide=False, float offset=0.) -> Tensor");
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("linears(Tensor x, int index, int[] outputs) -> Tensor[]");
  const c10::DispatchKey key = c10::DispatchKey::CompositeExplicitAutograd;
  m.impl("block", key, TORCH_FN(epikv::CompiledBlock));
  m.impl("attention", key, TORCH_FN(epikv::CompiledAttention));
  m.impl("rms_norm", key, TORCH_FN(epikv::CompiledRmsNorm));
  m.impl("swiglu", key, TORCH_FN(epikv::CompiledSwiGlu));
  m.impl("linears", key, TORCH_FN(epikv::CompiledLinears));
}
