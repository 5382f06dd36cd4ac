#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/strings/string_view.h"
#include "runtime/base/dtype.h"
#include "runtime/base/huge_pages.h"
#include "runtime/model/packed_weight.h"

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
//
// For a device that is not the CPU, only those that share their input are rewritten, with
// `prepack`; their weights lie there then.
PackedLinears PackLinears(torch::jit::Graph& graph, bool prepack, at::Device device = at::kCPU);

// ", 3 of 4 linears prepacked for ...": what follows a model's dtype where it is described.
// prepack: whether that was asked for.
std::string Describe(const PackedLinears& packed, DType dtype, bool prepack);

// Weights of linears of one x, [outputs, in] each, which one product computes: their outputs come
// one after another.

// Whether they are packed: always where they are integers, else with `prepack` where it pays.
bool ArePacked(const std::vector<at::Tensor>& weights, bool integers, bool prepack);
// scales: of weights of integers, one each (epikv::quantized_linear); else empty.
c10::intrusive_ptr<PackedWeight> PackTogether(const std::vector<at::Tensor>& weights,
                                              const std::vector<at::Tensor>& scales,
                                              WeightArena& arena);
// Zeros for those that have none; none where none has one.
std::optional<at::Tensor> BiasTogether(const std::vector<at::Tensor>& weights,
                                       const std::vector<std::optional<at::Tensor>>& biases,
                                       at::ScalarType dtype);

}  // namespace epikv
