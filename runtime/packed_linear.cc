#include "runtime/packed_linear.h"

#include <ATen/ATen.h>
#include <malloc.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

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

bool CanPack(const Node* linear) {
  const Node* weight = linear->input(1)->node();
  return weight->kind() == c10::prim::Constant && CanPack(weight->t(c10::attr::value));
}

void CollectLinears(Block* block, std::vector<Node*>& found) {
  for (Node* node : block->nodes()) {
    for (Block* inner : node->blocks()) CollectLinears(inner, found);
    if (node->kind() == c10::aten::linear) found.push_back(node);
  }
}

}  // namespace

PackedLinears PackLinears(torch::jit::Graph& graph) {
  PackedLinears result;
  std::unordered_map<Value*, Value*> packed;  // a weight may serve several linears
  std::vector<Node*> linears;
  CollectLinears(graph.block(), linears);
  result.linears = static_cast<int64_t>(linears.size());
  for (Node* node : linears) {
    if (!CanPack(node)) continue;
    Value* weight = node->input(1);
    Value*& replacement = packed[weight];
    if (replacement == nullptr) {
      const at::Tensor& tensor = weight->node()->t(c10::attr::value);
      const auto holder = c10::make_intrusive<PackedWeight>(tensor);
      result.weights.emplace(tensor.const_data_ptr(), holder->packed());
      torch::jit::WithInsertPoint here(*graph.nodes().begin());
      replacement = graph.insertConstant(c10::IValue(holder));
    }
    static const c10::Symbol kind = c10::Symbol::fromQualString("epikv::packed_linear");
    Node* linear = graph.create(kind, {node->input(0), replacement, node->input(2)}, 1);
    linear->insertBefore(node)->output()->copyMetadata(node->output());
    node->output()->replaceAllUsesWith(linear->output());
    node->destroy();
    ++result.packed;
    if (!weight->hasUses()) weight->node()->destroy();
    malloc_trim(0);  // the freed weight lies between others: the heap would not shrink by itself
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
