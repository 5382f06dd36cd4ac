#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>

namespace torch::jit {
struct Graph;
}

namespace epikv {

struct PackedLinears {
  int64_t count = 0;  // linears rewritten
  // Each weight that was packed: its former address to its packed form [out, in], which to_dense()
  // turns back, bit for bit.
  std::unordered_map<const void*, at::Tensor> weights;
};

// Rewrites every aten::linear of `graph` whose weight is a constant to epikv::packed_linear over a
// copy of the weight that lies as this machine's oneDNN kernels read it, and drops the constant.
// Memory grows by one weight at most, where nobody else holds them. float32, and bfloat16 where
// the processor has it; other weights stay.
PackedLinears PackLinears(torch::jit::Graph& graph);

}  // namespace epikv
