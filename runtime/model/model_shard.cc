#include "runtime/model/model_shard.h"

#include <ATen/ATen.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/ranks/ranks.h"

namespace epikv {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

// Why a model cannot be split.
struct Indivisible : std::runtime_error {
  using std::runtime_error::runtime_error;
};

c10::Symbol Kind(const char* name) { return c10::Symbol::fromQualString(name); }

bool Is(const Node* node, const char* name) { return node->kind() == Kind(name); }

bool IsLinear(const Node* node) {
  return node->kind() == c10::aten::linear || Is(node, "epikv::quantized_linear");
}

bool IsTensor(const Value* value) {
  return value->node()->kind() == c10::prim::Constant &&
         value->type()->isSubtypeOf(*c10::TensorType::get());
}

// Each element of the output is of the same element of the inputs.
bool IsElementwise(const Node* node) {
  static const std::set<c10::Symbol> kinds = {
      Kind("epikv::swiglu"), Kind("aten::silu"),    Kind("aten::gelu"), Kind("aten::relu"),
      Kind("aten::mul"),     Kind("aten::sigmoid"), Kind("aten::tanh"), Kind("aten::square")};
  return kinds.count(node->kind()) > 0;
}

class Cutter {
 public:
  Cutter(Graph& graph, const Ranks& ranks, Manifest& manifest, Shards& shards)
      : graph_(graph), ranks_(ranks), manifest_(manifest), shards_(shards) {}

  void Cut() {
    if (manifest_.num_kv_heads % ranks_.size() != 0) {
      throw Indivisible(absl::StrCat("its ", manifest_.num_kv_heads, " KV heads"));
    }
    std::vector<Node*> nodes(graph_.nodes().begin(), graph_.nodes().end());
    for (Node* node : nodes) {
      if (Is(node, "epikv::attention")) CutAttention(node);
    }
    for (Node* node : nodes) {
      if (IsLinear(node) && cut_.count(node) == 0) CutFeedForward(node);
    }
    for (Node* node : nodes) {
      if (IsLinear(node) && cut_.count(node) == 0) CutHead(node);
    }
    for (Node* node : nodes) {
      if (node->kind() == c10::aten::embedding) CutEmbedding(node);
    }
    Own();
    manifest_.num_heads /= ranks_.size();
    manifest_.num_kv_heads /= ranks_.size();
  }

 private:
  // A constant in the place of an input that may have other uses.
  Value* Insert(Node* before, const c10::IValue& constant) {
    const torch::jit::WithInsertPoint here(before);
    return graph_.insertConstant(constant);
  }

  int64_t PartOf(int64_t count, const std::string& what) const {
    if (count % ranks_.size() != 0) throw Indivisible(absl::StrCat(what, " of ", count));
    return count / ranks_.size();
  }

  // This rank's part of a weight's dimension, in memory of its own.
  void CutTensor(Node* of, int input, int64_t dim, const std::string& what) {
    Value* const value = of->input(input);
    if (!IsTensor(value)) throw Indivisible(absl::StrCat(what, ", which is no constant"));
    const at::Tensor whole = value->node()->t(c10::attr::value);
    const int64_t part = PartOf(whole.size(dim), what);
    const at::Tensor cut = whole.narrow(dim, ranks_.rank() * part, part).clone();
    shards_[whole.const_data_ptr()] = cut;
    own_.insert(cut.const_data_ptr());
    of->replaceInput(input, Insert(of, cut));
  }

  // By its outputs.
  void CutColumns(Node* linear, const std::string& what) {
    if (!cut_.insert(linear).second) throw Indivisible(absl::StrCat(what, ", which is shared"));
    CutTensor(linear, 1, 0, what);
    const bool integers = Is(linear, "epikv::quantized_linear");
    if (integers) CutTensor(linear, 2, 0, what);
    const int bias = integers ? 3 : 2;
    if (IsTensor(linear->input(bias))) CutTensor(linear, bias, 0, what);
  }

  // By groups of inputs, which are made smaller where they are no multiple of the ranks.
  void CutScales(Node* linear, const std::string& what) {
    if (!IsTensor(linear->input(2))) throw Indivisible(what + ", whose scales are no constants");
    const at::Tensor scales = linear->input(2)->node()->t(c10::attr::value);
    if (scales.size(1) % ranks_.size() != 0) {
      linear->replaceInput(2, Insert(linear, scales.repeat_interleave(ranks_.size(), 1)));
    }
    CutTensor(linear, 2, 1, what);
  }

  // By its inputs; the sum of all ranks' products is the whole one's. Rank 0 adds the bias.
  void CutRows(Node* linear, const std::string& what) {
    cut_.insert(linear);
    CutTensor(linear, 1, 1, what);
    const bool integers = Is(linear, "epikv::quantized_linear");
    if (integers) CutScales(linear, what);
    const int bias = integers ? 3 : 2;
    if (ranks_.rank() > 0) linear->replaceInput(bias, Insert(linear, c10::IValue()));
    Follow(linear, "epikv::sum_ranks", std::nullopt);
  }

  // Puts an operator behind a node, which all its users see.
  void Follow(Node* node, const char* kind, std::optional<int64_t> more) {
    const torch::jit::WithInsertPoint here(node->next());
    std::vector<torch::jit::NamedValue> inputs = {node->output()};
    if (more.has_value()) inputs.emplace_back(*more);
    Value* const result = graph_.insert(Kind(kind), inputs);
    node->output()->replaceAllUsesAfterNodeWith(result->node(), result);
  }

  static void ExpectOneUse(const Value* value, const std::string& what) {
    if (value->uses().size() != 1) throw Indivisible(absl::StrCat(what, ", which has other uses"));
  }

  // A view whose second dimension counts heads, or the channels of all of them.
  void CutView(Node* view, const std::string& what) {
    std::vector<int64_t> sizes;
    if (const auto whole = torch::jit::constant_as<c10::List<int64_t>>(view->input(1))) {
      sizes = whole->vec();
    } else if (view->input(1)->node()->kind() == c10::prim::ListConstruct) {
      for (const Value* size : view->input(1)->node()->inputs()) {
        const auto known = torch::jit::constant_as<int64_t>(size);
        if (!known.has_value()) throw Indivisible(absl::StrCat(what, ", whose sizes vary"));
        sizes.push_back(*known);
      }
    }
    if (sizes.size() < 2 || sizes[0] != -1) {
      throw Indivisible(absl::StrCat(what, ", in a shape that is not known"));
    }
    if (sizes[1] == 1) throw Indivisible(absl::StrCat(what, ", which are normed together"));
    sizes[1] = PartOf(sizes[1], what);
    view->replaceInput(1, Insert(view, c10::IValue(sizes)));
  }

  // From what attention is given back to the linear that makes it.
  void CutHeads(Value* value, const std::string& what) {
    Node* node = value->node();
    ExpectOneUse(value, what);
    if (IsLinear(node)) return CutColumns(node, what);
    if (Is(node, "aten::view") || Is(node, "aten::reshape")) {
      CutView(node, what);
    } else if (!Is(node, "epikv::rms_norm")) {  // of each head: CutView has seen that
      throw Indivisible(absl::StrCat(what, ", which ", node->kind().toQualString(), " makes"));
    }
    CutHeads(node->input(0), what);
  }

  void CutAttention(Node* attention) {
    const std::string heads = "the heads of attention";
    for (int input = 0; input < 3; ++input) CutHeads(attention->input(input), heads);
    Node* node = attention;
    do {
      ExpectOneUse(node->output(), heads);
      node = node->output()->uses()[0].user;
      if (Is(node, "aten::view") || Is(node, "aten::reshape")) {
        CutView(node, heads);
      } else if (!IsLinear(node)) {
        throw Indivisible(absl::StrCat(heads, ", which ", node->kind().toQualString(), " takes"));
      }
    } while (!IsLinear(node));
    CutRows(node, heads);
  }

  // The linears from which a value is made, element by element; empty: it is made in other ways.
  std::vector<Node*> Sources(Value* value) const {
    Node* const node = value->node();
    if (value->uses().size() != 1) return {};
    if (IsLinear(node)) return cut_.count(node) > 0 ? std::vector<Node*>() : std::vector{node};
    if (!IsElementwise(node)) return {};
    std::vector<Node*> all;
    for (Value* input : node->inputs()) {
      if (!input->type()->isSubtypeOf(*c10::TensorType::get())) continue;
      const std::vector<Node*> of = Sources(input);
      if (of.empty()) return {};
      all.insert(all.end(), of.begin(), of.end());
    }
    return all;
  }

  // `down`, if what it takes is made of linears alone.
  void CutFeedForward(Node* down) {
    if (IsLinear(down->input(0)->node())) return;  // two in a row: of no feed-forward that we know
    const std::vector<Node*> sources = Sources(down->input(0));
    if (sources.empty()) return;
    const std::string channels = "the channels of a feed-forward";
    for (Node* source : sources) CutColumns(source, channels);
    CutRows(down, channels);
  }

  // Rows of zeros make the parts equal.
  at::Tensor PartOfVocabulary(const at::Tensor& weight) const {
    const int64_t vocab = weight.size(0), part = VocabularyPart();
    const int64_t begin = std::min(ranks_.rank() * part, vocab);
    const at::Tensor own = weight.narrow(0, begin, std::min(part, vocab - begin));
    if (own.size(0) == part) return own.clone();
    std::vector<int64_t> missing = weight.sizes().vec();
    missing[0] = part - own.size(0);
    return at::cat({own, at::zeros(missing, weight.options())});
  }
  int64_t VocabularyPart() const {
    return (manifest_.vocab_size + ranks_.size() - 1) / ranks_.size();
  }

  void CutHead(Node* linear) {
    if (!IsTensor(linear->input(1))) return;
    const bool integers = Is(linear, "epikv::quantized_linear");
    if (linear->input(1)->node()->t(c10::attr::value).size(0) != manifest_.vocab_size) return;
    cut_.insert(linear);
    for (const int input : integers ? std::vector{1, 2, 3} : std::vector{1, 2}) {
      if (!IsTensor(linear->input(input))) continue;
      const at::Tensor whole = linear->input(input)->node()->t(c10::attr::value);
      linear->replaceInput(input, Insert(linear, Vocabulary(whole)));
    }
    Follow(linear, "epikv::gather_ranks", manifest_.vocab_size);
  }

  void CutEmbedding(Node* embedding) {
    if (!IsTensor(embedding->input(0))) return;
    const at::Tensor whole = embedding->input(0)->node()->t(c10::attr::value);
    if (whole.size(0) != manifest_.vocab_size) return;
    Value* part = nullptr;
    {
      const torch::jit::WithInsertPoint here(embedding);
      part = graph_.insert(Kind("epikv::embedding_part"), {Vocabulary(whole), embedding->input(1),
                                                           ranks_.rank() * VocabularyPart()});
    }
    embedding->output()->replaceAllUsesWith(part);
    embedding->destroy();
    Follow(part->node(), "epikv::sum_ranks", std::nullopt);
  }

  // Once of a weight that embedding and head share.
  at::Tensor Vocabulary(const at::Tensor& whole) {
    at::Tensor& part = vocabulary_[whole.const_data_ptr()];
    if (!part.defined()) part = PartOfVocabulary(whole);
    own_.insert(part.const_data_ptr());
    return part;
  }

  // Of what is not cut, too: whole weights are of memory that is given back.
  void Own() {
    std::vector<Node*> unused;
    std::map<const void*, at::Tensor> copies;  // by what they are of: some share it
    for (Node* node : graph_.nodes()) {
      if (node->kind() != c10::prim::Constant) continue;
      if (!node->output()->hasUses()) {
        unused.push_back(node);
      } else if (IsTensor(node->output())) {
        const at::Tensor tensor = node->t(c10::attr::value);
        if (own_.count(tensor.const_data_ptr()) > 0) continue;
        at::Tensor& own = copies[tensor.const_data_ptr()];
        const bool same = own.defined() && own.dtype() == tensor.dtype() &&
                          own.sizes() == tensor.sizes() && own.strides() == tensor.strides();
        if (!same) own = tensor.clone();
        node->t_(c10::attr::value, own);
      }
    }
    for (Node* node : unused) node->destroy();
  }

  Graph& graph_;
  const Ranks& ranks_;
  Manifest& manifest_;
  Shards& shards_;
  Shards vocabulary_;
  std::set<const Node*> cut_;  // linears
  std::set<const void*> own_;  // data of parts
};

}  // namespace

absl::Status CutShard(Graph& graph, const Ranks& ranks, Manifest& manifest, Shards& shards) {
  try {
    Cutter(graph, ranks, manifest, shards).Cut();
    return absl::OkStatus();
  } catch (const Indivisible& why) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot be split into ", ranks.size(), " parts: ", why.what()));
  }
}

}  // namespace epikv
