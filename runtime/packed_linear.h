#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <unordered_map>

namespace torch::jit {
struct Graph;
}

namespace epikv {

struct PackedLinears {
  int64_t linears = 0;    // of weights in a floating-point type, in the graph
  int64_t packed = 0;     // of these, rewritten
  int64_t quantized = 0;  // of weights in integers, all rewritten
  int64_t bytes = 0;      // of all packed weights
  // Each weight that was packed, by its former address: makes it again, [out, in]. Bit for bit, or
  // what its integers stand for, in a dtype.
  std::unordered_map<const void*, std::function<at::Tensor(at::ScalarType)>> dense;
};

// Rewrites linears of `graph` whose weights are constants, and drops the constants. Those that
// share their input, as q, k and v do, become one. Memory grows by the weights of one at most,
// where nobody else holds them. Each epikv::quantized_linear becomes a product of ours
// (quantized_linear.h); with `prepack`, each aten::linear becomes epikv::packed_linear over a copy
// of the weight that lies as this machine's oneDNN kernels read it. Other weights stay: small ones
// of float32, and bfloat16 where the processor does not have it.
PackedLinears PackLinears(torch::jit::Graph& graph, bool prepack);

}  // namespace epikv
