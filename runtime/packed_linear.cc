#include "runtime/packed_linear.h"

#include <ATen/ATen.h>
#include <malloc.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/quantized_linear.h"

namespace epikv {
namespace {

using torch::jit::Block;
using torch::jit::Node;
using torch::jit::Value;

// Rows that oneDNN is told to expect. It fixes the layout, not what may be run: with 16, float32
// is fastest or equal from 1 to 512 rows, and bfloat16 does not care.
constexpr int64_t kExpectedRows = 16;

// Elements of a float32 weight from which packing pays: oneDNN takes 8 us more a call than MKL, but
// is up to twice as fast from 2 rows on. In bfloat16 both are oneDNN.
constexpr int64_t kSmallestPacked = 256 * 256;

// A kernel that ATen publishes only through the dispatcher.
template <typename Signature>
auto Operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// A constant of the graph. Immutable, shared by all threads.
class PackedWeight : public torch::CustomClassHolder {
 public:
  explicit PackedWeight(const at::Tensor& weight)
      : in_(weight.size(1)), out_(weight.size(0)), dtype_(weight.scalar_type()) {
    static const auto reorder = Operator<at::Tensor(const at::Tensor&, std::optional<int64_t>)>(
        "mkldnn::_reorder_linear_weight");
    packed_ = reorder.call(weight.detach(), kExpectedRows);
  }

  const at::Tensor& packed() const { return packed_; }

  // x [..., in] -> [..., out]
  at::Tensor Apply(const at::Tensor& x, const std::optional<at::Tensor>& bias) const {
    TORCH_CHECK(x.scalar_type() == dtype_ && x.dim() > 0 && x.size(-1) == in_,
                "epikv::packed_linear: x is ", x.scalar_type(), x.sizes(), ", the weight ", dtype_,
                " [", out_, ", ", in_, "]");
    if (x.numel() == 0) {
      std::vector<int64_t> sizes = x.sizes().vec();
      sizes.back() = out_;
      return at::empty(sizes, x.options());
    }
    using Scalars = c10::List<std::optional<at::Scalar>>;
    static const auto linear =
        Operator<at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                            std::string_view, Scalars, std::optional<std::string_view>)>(
            "mkldnn::_linear_pointwise");
    static const Scalars none;
    return linear.call(x, packed_, bias, "none", none, "");
  }

 private:
  const int64_t in_;
  const int64_t out_;
  const at::ScalarType dtype_;
  at::Tensor packed_;
};

at::Tensor PackedLinear(const at::Tensor& x, const c10::intrusive_ptr<PackedWeight>& weight,
                        const std::optional<at::Tensor>& bias) {
  return weight->Apply(x, bias);
}

// weight: of a linear; elements: of it and its siblings.
bool CanPack(const at::Tensor& weight, int64_t elements) {
  if (!at::globalContext().hasMKLDNN() || !weight.device().is_cpu() || weight.dim() != 2) {
    return false;
  }
  if (weight.scalar_type() == at::kFloat) return elements >= kSmallestPacked;
  static const bool has_bfloat16 = Operator<bool()>("mkldnn::_is_mkldnn_bf16_supported").call();
  return weight.scalar_type() == at::kBFloat16 && has_bfloat16;
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

// One input of all of them, the outputs of one after those of another; as it is of one alone.
at::Tensor Together(const Siblings& linears, int input) {
  if (linears.size() == 1) return TensorOf(linears[0]->input(input));
  std::vector<at::Tensor> parts;
  for (const Node* linear : linears) parts.push_back(TensorOf(linear->input(input)));
  return at::cat(parts);
}

class Packer {
 public:
  Packer(torch::jit::Graph& graph, PackedLinears& result) : graph_(graph), result_(result) {}

  // Packs their weights and has one node compute them, in the place of the first.
  void Pack(const Siblings& linears) {
    Value*& packed = packed_[linears[0]->input(1)];  // a weight may serve linears of several x
    if (packed == nullptr) packed = PackWeights(linears);
    const auto count = static_cast<int64_t>(linears.size());
    const bool quantized = IsQuantized(linears[0]);
    (quantized ? result_.quantized : result_.packed) += count;
    const char* const kind = quantized ? "epikv::packed_quantized_linear" : "epikv::packed_linear";
    const torch::jit::WithInsertPoint here(linears[0]);
    Value* const all = graph_.insert(c10::Symbol::fromQualString(kind),
                                     {linears[0]->input(0), packed, Bias(linears)});
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
  Value* PackWeights(const Siblings& linears) {
    const at::Tensor weight = Together(linears, 1);
    std::function<at::Tensor(at::ScalarType)> dense;
    c10::IValue packed;
    if (IsQuantized(linears[0])) {
      const auto holder = c10::make_intrusive<PackedQuantizedWeight>(weight, Together(linears, 2));
      result_.bytes += holder->bytes();
      dense = [holder](at::ScalarType dtype) { return holder->Dense(dtype); };
      packed = holder;
    } else {
      const auto holder = c10::make_intrusive<PackedWeight>(weight);
      const at::Tensor reordered = holder->packed();
      result_.bytes += reordered.numel() * static_cast<int64_t>(reordered.itemsize());
      dense = [reordered](at::ScalarType) { return reordered.to_dense(); };
      packed = holder;
    }
    int64_t begin = 0;
    for (const Node* linear : linears) {
      const at::Tensor& of = TensorOf(linear->input(1));
      const int64_t count = of.size(0);
      result_.dense.emplace(of.const_data_ptr(), [dense, begin, count](at::ScalarType dtype) {
        return dense(dtype).narrow(0, begin, count);
      });
      begin += count;
    }
    const torch::jit::WithInsertPoint first(*graph_.nodes().begin());
    return graph_.insertConstant(std::move(packed));
  }

  // Of those that have none, zeros; None if none of them has one.
  c10::IValue Bias(const Siblings& linears) const {
    if (linears.size() == 1) return *torch::jit::toIValue(BiasOf(linears[0]));
    std::vector<at::Tensor> biases;
    for (const Node* linear : linears) {
      if (IsConstant(BiasOf(linear))) biases.push_back(TensorOf(BiasOf(linear)));
    }
    if (biases.empty()) return {};
    const at::TensorOptions like = biases[0].options();
    std::vector<at::Tensor> parts;
    for (const Node* linear : linears) {
      const bool has = IsConstant(BiasOf(linear));
      const int64_t count = TensorOf(linear->input(1)).size(0);
      parts.push_back(has ? TensorOf(BiasOf(linear)) : at::zeros({count}, like));
    }
    return at::cat(parts);
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
  PackedLinears& result_;
  std::unordered_map<const Value*, Value*> packed_;
};

// Whether their weights, together, can be packed and shall be.
bool ArePacked(const Siblings& linears, bool prepack) {
  if (!HasConstants(linears[0])) return false;
  if (IsQuantized(linears[0])) return true;
  int64_t elements = 0;
  for (const Node* linear : linears) elements += TensorOf(linear->input(1)).numel();
  return prepack && CanPack(TensorOf(linears[0]->input(1)), elements);
}

}  // namespace

PackedLinears PackLinears(torch::jit::Graph& graph, bool prepack) {
  PackedLinears result;
  std::vector<Siblings> found;
  CollectLinears(graph.block(), found);
  Packer packer(graph, result);
  for (const Siblings& linears : found) {
    if (!IsQuantized(linears[0])) result.linears += static_cast<int64_t>(linears.size());
    if (ArePacked(linears, prepack)) packer.Pack(linears);
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
