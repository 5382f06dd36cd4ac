#include "runtime/model/packed_linear.h"

#include <ATen/ATen.h>
#include <malloc.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/base/scalar_type.h"
#include "runtime/model/dense_linear.h"
#include "runtime/model/device_weight.h"
#include "runtime/model/one_dnn_weight.h"
#include "runtime/model/quantized_linear.h"

namespace epikv {
namespace {

using torch::jit::Block;
using torch::jit::Node;
using torch::jit::Value;

// Elements of a float32 weight from which packing pays: a call of oneDNN's takes 8 us more than one
// of MKL's, but is up to twice as fast from 2 rows on.
constexpr int64_t kSmallestPacked = 256 * 256;

// Whether our own products of such weights are the fastest.
bool AreOurs(const at::Tensor& weight) {
  const at::ScalarType dtype = weight.scalar_type();
  return (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf) &&
         FastestDensePath(DTypeOf(dtype)).has_value();
}

// weight: of a linear; elements: of it and its siblings.
bool CanPack(const at::Tensor& weight, int64_t elements) {
  if (!weight.device().is_cpu() || weight.dim() != 2 || weight.numel() == 0) return false;
  if (weight.scalar_type() == at::kFloat && elements < kSmallestPacked) return false;
  return AreOurs(weight) || OneDnnWeight::Supports(weight.scalar_type());
}

c10::intrusive_ptr<PackedWeight> PackWeight(const at::Tensor& weight, WeightArena& arena) {
  if (AreOurs(weight)) return c10::make_intrusive<PackedDenseWeight>(weight, arena);
  return c10::make_intrusive<OneDnnWeight>(weight);
}

at::Tensor PackedLinear(const at::Tensor& x, const c10::intrusive_ptr<PackedWeight>& weight,
                        const std::optional<at::Tensor>& bias) {
  return weight->Apply(x, bias);
}

bool IsConstant(const Value* value) {
  return value->node()->kind() == c10::prim::Constant &&
         value->type()->isSubtypeOf(*c10::TensorType::get());
}

const at::Tensor& TensorOf(const Value* constant) { return constant->node()->t(c10::attr::value); }

// Linears that one product computes: of one kind, over one x, in the order of the graph.
using Siblings = std::vector<Node*>;

bool IsQuantized(const Node* linear) {
  static const c10::Symbol kind = c10::Symbol::fromQualString("epikv::quantized_linear");
  return linear->kind() == kind;
}

const Value* BiasOf(const Node* linear) { return linear->input(IsQuantized(linear) ? 3 : 2); }

// Whether all but x are constants.
bool HasConstants(const Node* linear) {
  return IsConstant(linear->input(1)) && (!IsQuantized(linear) || IsConstant(linear->input(2))) &&
         BiasOf(linear)->node()->kind() == c10::prim::Constant;
}

// Whether their weights fit together, and nobody else uses them.
bool AreSiblings(const Node* a, const Node* b) {
  auto fits = [&](int input) {
    const at::Tensor &one = TensorOf(a->input(input)), &other = TensorOf(b->input(input));
    return one.dim() == 2 && other.dim() == 2 && one.size(1) == other.size(1) &&
           one.scalar_type() == other.scalar_type();
  };
  return a->kind() == b->kind() && a->input(0) == b->input(0) && HasConstants(a) &&
         HasConstants(b) && a->input(1)->uses().size() == 1 && b->input(1)->uses().size() == 1 &&
         fits(1) && (!IsQuantized(a) || fits(2));
}

void CollectLinears(Block* block, std::vector<Siblings>& found) {
  const size_t begin = found.size();  // of this block
  for (Node* node : block->nodes()) {
    if (node->kind() != c10::aten::linear && !IsQuantized(node)) continue;
    const auto siblings = std::find_if(found.begin() + begin, found.end(),
                                       [&](const auto& of) { return AreSiblings(of[0], node); });
    if (siblings != found.end()) {
      siblings->push_back(node);
    } else {
      found.push_back({node});
    }
  }
  for (Node* node : block->nodes()) {
    for (Block* inner : node->blocks()) CollectLinears(inner, found);
  }
}

// One input of all of them.
std::vector<at::Tensor> InputsOf(const Siblings& linears, int input) {
  std::vector<at::Tensor> parts;
  parts.reserve(linears.size());
  for (const Node* linear : linears) parts.push_back(TensorOf(linear->input(input)));
  return parts;
}

// The outputs of one after those of another; as it is of one alone.
at::Tensor Together(const std::vector<at::Tensor>& parts) {
  return parts.size() == 1 ? parts[0] : at::cat(parts);
}

class Packer {
 public:
  Packer(torch::jit::Graph& graph, at::Device device, PackedLinears& result)
      : graph_(graph), device_(device), result_(result) {}

  // Packs their weights and has one node compute them, in the place of the first.
  void Pack(const Siblings& linears) {
    Packed& packed = packed_[linears[0]->input(1)];  // a weight may serve linears of several x
    if (packed.constant == nullptr) packed = PackWeights(linears);
    const auto count = static_cast<int64_t>(linears.size());
    const bool quantized = IsQuantized(linears[0]);
    (quantized ? result_.quantized : result_.packed) += count;
    (quantized ? result_.quantized_for : result_.packed_for) = packed.weight->kernels();
    static const c10::Symbol kind = c10::Symbol::fromQualString("epikv::packed_linear");
    const torch::jit::WithInsertPoint here(linears[0]);
    Value* const all = graph_.insert(
        kind, {linears[0]->input(0), packed.constant, Bias(linears, packed.weight->bias_dtype())});
    if (count == 1) {
      linears[0]->output()->replaceAllUsesWith(all);
    } else {
      std::vector<int64_t> outputs;
      for (const Node* linear : linears) outputs.push_back(TensorOf(linear->input(1)).size(0));
      Value* const parts = graph_.insert(c10::aten::split_with_sizes, {all, outputs, -1});
      Node* const unpack = graph_.insertNode(graph_.createListUnpack(parts, linears.size()));
      for (size_t i = 0; i < linears.size(); ++i) {
        linears[i]->output()->replaceAllUsesWith(unpack->output(i));
      }
    }
    for (Node* linear : linears) Drop(linear);
    malloc_trim(0);  // the freed weights lie between others: the heap would not shrink by itself
  }

 private:
  struct Packed {
    c10::intrusive_ptr<PackedWeight> weight;
    Value* constant = nullptr;
  };

  Packed PackWeights(const Siblings& linears) {
    const std::vector<at::Tensor> weights = InputsOf(linears, 1);
    const std::vector<at::Tensor> scales =
        IsQuantized(linears[0]) ? InputsOf(linears, 2) : std::vector<at::Tensor>();
    c10::intrusive_ptr<PackedWeight> packed;
    if (device_.is_cpu()) {
      packed = PackTogether(weights, scales, arena_);
    } else {
      packed = c10::make_intrusive<DeviceWeight>(Together(weights), device_);
    }
    result_.bytes += packed->bytes();
    int64_t begin = 0;
    for (const Node* linear : linears) {
      const at::Tensor& of = TensorOf(linear->input(1));
      const int64_t count = of.size(0);
      result_.dense.emplace(of.const_data_ptr(), [packed, begin, count](at::ScalarType dtype) {
        return packed->Dense(dtype).narrow(0, begin, count);
      });
      begin += count;
    }
    const torch::jit::WithInsertPoint first(*graph_.nodes().begin());
    return {packed, graph_.insertConstant(packed)};
  }

  // As a constant; None if none of them has one.
  static c10::IValue Bias(const Siblings& linears, at::ScalarType dtype) {
    std::vector<std::optional<at::Tensor>> biases;
    for (const Node* linear : linears) {
      const bool has = IsConstant(BiasOf(linear));
      biases.push_back(has ? std::make_optional(TensorOf(BiasOf(linear))) : std::nullopt);
    }
    return BiasTogether(InputsOf(linears, 1), biases, dtype);
  }

  // The node, and the constants that were its own.
  static void Drop(Node* linear) {
    const std::vector<Value*> inputs = linear->inputs().vec();
    linear->destroy();
    for (Value* input : inputs) {
      if (!input->hasUses() && input->node()->kind() == c10::prim::Constant) {
        input->node()->destroy();
      }
    }
  }

  torch::jit::Graph& graph_;
  const at::Device device_;
  PackedLinears& result_;
  WeightArena arena_;
  std::unordered_map<const Value*, Packed> packed_;
};

}  // namespace

bool ArePacked(const std::vector<at::Tensor>& weights, bool integers, bool prepack) {
  if (integers) return true;
  int64_t elements = 0;
  for (const at::Tensor& weight : weights) elements += weight.numel();
  return prepack && CanPack(weights[0], elements);
}

c10::intrusive_ptr<PackedWeight> PackTogether(const std::vector<at::Tensor>& weights,
                                              const std::vector<at::Tensor>& scales,
                                              WeightArena& arena) {
  const at::Tensor weight = Together(weights);
  if (scales.empty()) return PackWeight(weight, arena);
  return c10::make_intrusive<PackedQuantizedWeight>(weight, Together(scales), arena);
}

std::optional<at::Tensor> BiasTogether(const std::vector<at::Tensor>& weights,
                                       const std::vector<std::optional<at::Tensor>>& biases,
                                       at::ScalarType dtype) {
  std::vector<at::Tensor> parts;
  bool any = false;
  for (size_t i = 0; i < weights.size(); ++i) {
    any = any || biases[i].has_value();
    parts.push_back(biases[i].value_or(at::zeros({weights[i].size(0)})));
  }
  if (!any) return std::nullopt;
  return at::cat(parts).to(dtype);
}

std::string Describe(const PackedLinears& packed, DType dtype, bool prepack) {
  std::string text;
  if (packed.quantized > 0) {
    absl::StrAppend(&text, ", ", packed.quantized, " linears of integers (", packed.quantized_for,
                    ")");
  }
  if (packed.linears == 0) return text;
  if (!prepack) return absl::StrCat(text, ", no linear prepacked, as asked");
  absl::StrAppend(&text, ", ", packed.packed, " of ", packed.linears, " linears prepacked");
  if (packed.packed > 0) absl::StrAppend(&text, " for ", packed.packed_for);
  if (dtype == DType::kBFloat16 && packed.packed == 0) {
    absl::StrAppend(&text, ": this processor has no bfloat16");
  }
  return text;
}

PackedLinears PackLinears(torch::jit::Graph& graph, bool prepack, at::Device device) {
  PackedLinears result;
  std::vector<Siblings> found;
  CollectLinears(graph.block(), found);
  Packer packer(graph, device, result);
  for (const Siblings& linears : found) {
    if (!IsQuantized(linears[0])) result.linears += static_cast<int64_t>(linears.size());
    if (!HasConstants(linears[0])) continue;
    const bool quantized = IsQuantized(linears[0]);
    const bool pays = device.is_cpu() ? ArePacked(InputsOf(linears, 1), quantized, prepack)
                                      : prepack && !quantized && linears.size() > 1;
    if (pays) packer.Pack(linears);
  }
  return result;
}

}  // namespace epikv

TORCH_LIBRARY_FRAGMENT(epikv, m) {
  m.class_<epikv::PackedWeight>("PackedWeight");
  m.def(
      "packed_linear(Tensor x, __torch__.torch.classes.epikv.PackedWeight weight, Tensor? bias)"
      " -> Tensor");
  m.impl("packed_linear", c10::DispatchKey::CompositeExplicitAutograd,
         TORCH_FN(epikv::PackedLinear));
}
