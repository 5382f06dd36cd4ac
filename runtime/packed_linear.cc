#include "runtime/packed_linear.h"

#include <ATen/ATen.h>
#include <malloc.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/custom_class.h>
#include <torch/library.h>

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

bool CanPack(const at::Tensor& weight) {
  if (!at::globalContext().hasMKLDNN() || !weight.device().is_cpu() || weight.dim() != 2) {
    return false;
  }
  if (weight.scalar_type() == at::kFloat) return weight.numel() >= kSmallestPacked;
  static const bool has_bfloat16 = Operator<bool()>("mkldnn::_is_mkldnn_bf16_supported").call();
  return weight.scalar_type() == at::kBFloat16 && has_bfloat16;
}

bool IsConstant(const Value* value) {
  return value->node()->kind() == c10::prim::Constant &&
         value->type()->isSubtypeOf(*c10::TensorType::get());
}

const at::Tensor& TensorOf(const Value* constant) { return constant->node()->t(c10::attr::value); }

void CollectNodes(Block* block, c10::Symbol kind, std::vector<Node*>& found) {
  for (Node* node : block->nodes()) {
    for (Block* inner : node->blocks()) CollectNodes(inner, kind, found);
    if (node->kind() == kind) found.push_back(node);
  }
}

// Rewrites linears, one after the other. A weight may serve several.
class Packer {
 public:
  Packer(torch::jit::Graph& graph, PackedLinears& result) : graph_(graph), result_(result) {}

  // Of aten::linear(x, weight, bias).
  void Pack(Node* linear) {
    Value* const weight = linear->input(1);
    Value*& packed = packed_[weight];
    if (packed == nullptr) {
      const auto holder = c10::make_intrusive<PackedWeight>(TensorOf(weight));
      const at::Tensor reordered = holder->packed();
      Note(weight, reordered.numel() * static_cast<int64_t>(reordered.itemsize()),
           [reordered](at::ScalarType) { return reordered.to_dense(); });
      packed = Insert(holder);
    }
    Replace(linear, "epikv::packed_linear", packed, linear->input(2));
    ++result_.packed;
  }

  // Of epikv::quantized_linear(x, weight, scale, bias).
  void PackQuantized(Node* linear) {
    Value* const weight = linear->input(1);
    Value*& packed = packed_[weight];
    if (packed == nullptr) {
      const auto holder =
          c10::make_intrusive<PackedQuantizedWeight>(TensorOf(weight), TensorOf(linear->input(2)));
      Note(weight, holder->bytes(),
           [holder](at::ScalarType dtype) { return holder->Dense(dtype); });
      packed = Insert(holder);
    }
    Replace(linear, "epikv::packed_quantized_linear", packed, linear->input(3));
    ++result_.quantized;
  }

 private:
  void Note(const Value* weight, int64_t bytes, std::function<at::Tensor(at::ScalarType)> dense) {
    result_.bytes += bytes;
    result_.dense.emplace(TensorOf(weight).const_data_ptr(), std::move(dense));
  }

  Value* Insert(c10::IValue constant) {
    const torch::jit::WithInsertPoint here(*graph_.nodes().begin());
    return graph_.insertConstant(std::move(constant));
  }

  void Replace(Node* node, const char* kind, Value* packed, Value* bias) {
    Node* const linear =
        graph_.create(c10::Symbol::fromQualString(kind), {node->input(0), packed, bias}, 1);
    linear->insertBefore(node)->output()->copyMetadata(node->output());
    node->output()->replaceAllUsesWith(linear->output());
    const std::vector<Value*> inputs = node->inputs().vec();
    node->destroy();
    for (size_t i = 1; i < inputs.size(); ++i) {
      if (!inputs[i]->hasUses() && IsConstant(inputs[i])) inputs[i]->node()->destroy();
    }
    malloc_trim(0);  // the freed weight lies between others: the heap would not shrink by itself
  }

  torch::jit::Graph& graph_;
  PackedLinears& result_;
  std::unordered_map<Value*, Value*> packed_;
};

}  // namespace

PackedLinears PackLinears(torch::jit::Graph& graph, bool prepack) {
  PackedLinears result;
  Packer packer(graph, result);
  std::vector<Node*> quantized, linears;
  CollectNodes(graph.block(), c10::Symbol::fromQualString("epikv::quantized_linear"), quantized);
  CollectNodes(graph.block(), c10::aten::linear, linears);
  result.linears = static_cast<int64_t>(linears.size());
  for (Node* node : quantized) {
    if (IsConstant(node->input(1)) && IsConstant(node->input(2))) packer.PackQuantized(node);
  }
  for (Node* node : linears) {
    if (prepack && IsConstant(node->input(1)) && CanPack(TensorOf(node->input(1)))) {
      packer.Pack(node);
    }
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
