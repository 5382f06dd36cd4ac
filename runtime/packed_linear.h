#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>

namespace torch::jit {
struct Graph;
}

namespace epikv {

struct PackedLinears {
  int64_t linears = 0;  // in the graph
  int64_t packed = 0;   // of these, rewritten
  // Each weight that was packed: its former address to its packed form [out, in], which to_dense()
  // turns back, bit for bit.
  std::unordered_map<const void*, at::Tensor> weights;
};

// Rewrites every aten::linear of `graph` whose weight is a constant to epikv::packed_linear over a
// copy of the weight that lies as this machine's oneDNN kernels read it, and drops the constant.
// Memory grows by one weight at most, where nobody else holds them. Other weights stay: small ones
// of float32, and bfloat16 where the processor does not have it.
PackedLinears PackLinears(torch::jit::Graph& graph);

}  // namespace epikv
