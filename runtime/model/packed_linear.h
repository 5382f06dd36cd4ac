#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <unordered_map>

#include "absl/strings/string_view.h"

namespace torch::jit {
struct Graph;
}

namespace epikv {

struct PackedLinears {
  int64_t linears = 0;                          // of weights in a floating-point type, in the graph
  int64_t packed = 0;                           // of these, rewritten
  int64_t quantized = 0;                        // of weights in integers, all rewritten
  absl::string_view packed_for, quantized_for;  // PackedWeight::kernels
  int64_t bytes = 0;                            // of all packed weights
  // Each weight that was packed, by its former address: makes it again, [out, in]. Bit for bit, or
  // what its integers stand for, in a dtype.
  std::unordered_map<const void*, std::function<at::Tensor(at::ScalarType)>> dense;
};

// Rewrites linears of `graph` whose weights are constants, and drops the constants. Those that
// share their input, as q, k and v do, become one. Memory grows by the weights of one at most,
// where nobody else holds them. Each becomes epikv::packed_linear over a PackedWeight: an
// epikv::quantized_linear always; an aten::linear with `prepack`, where our products or oneDNN's
// gain by it, which those of small weights of float32 do not.
PackedLinears PackLinears(torch::jit::Graph& graph, bool prepack);

}  // namespace epikv
