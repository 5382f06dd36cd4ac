#include "runtime/model/model_contract.h"

#include <ATen/ATen.h>
#include <malloc.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "runtime/base/scalar_type.h"
#include "runtime/model/module_reader.h"

namespace epikv {
namespace {

using torch::jit::Block;
using torch::jit::Graph;
using torch::jit::Module;
using torch::jit::Node;
using torch::jit::Value;

// "block(3)"
std::string CallName(absl::string_view op, int64_t layer) {
  return absl::StrCat(op, "(", layer, ")");
}

// Reads the calls of the two operators out of a graph, and what changes the module.
class GraphReader {
 public:
  GraphReader(const Graph& graph, const Module& module)
      : self_(graph.inputs()[0]), module_(module) {}

  void Read(const Block* block, absl::string_view place) {
    for (const Node* node : block->nodes()) {
      ReadNode(node, place);
      for (const Block* inner : node->blocks()) {
        Read(inner, node->kind() == c10::prim::If ? "under a condition" : "in a loop");
      }
    }
  }

  // "block(0)", "attention(0)", ... in the order of the code
  const std::vector<std::string>& calls() const { return calls_; }
  const std::vector<std::string>& violations() const { return violations_; }

 private:
  void ReadNode(const Node* node, absl::string_view place) {
    const std::string kind = node->kind().toQualString();
    if (kind == "epikv::block" || kind == "epikv::attention") {
      ReadCall(node, kind.substr(7), place);
    } else if (kind == "prim::SetAttr") {
      violations_.push_back(absl::StrCat("forward sets the attribute '", node->s(c10::attr::name),
                                         "', which is not allowed: a module must keep no state"));
    } else if (kind == "prim::CallMethod" || kind == "prim::CallFunction") {
      violations_.push_back("forward makes a call that cannot be inlined");
    }
  }

  void ReadCall(const Node* node, const std::string& op, absl::string_view place) {
    const Value* argument = node->inputs().back();
    const std::optional<c10::IValue> layer = Fixed(argument);
    if (!layer || !layer->isInt()) {
      violations_.push_back(absl::StrCat(op, " is called with a layer that is not constant"));
      return;
    }
    const std::string name = CallName(op, layer->toInt());
    calls_.push_back(name);
    if (!place.empty()) violations_.push_back(absl::StrCat(name, " is called ", place));
    if (!node->output()->hasUses()) {
      violations_.push_back(absl::StrCat("the result of ", name, " is not used"));
    }
  }

  // What `value` holds if that is fixed: a constant, or an attribute of the module.
  std::optional<c10::IValue> Fixed(const Value* value) const {
    if (value == self_) return module_._ivalue();
    const Node* node = value->node();
    if (node->kind() == c10::prim::Constant) return torch::jit::toIValue(value);
    if (node->kind() != c10::prim::GetAttr) return std::nullopt;
    const std::optional<c10::IValue> owner = Fixed(node->input());
    if (!owner || !owner->isObject()) return std::nullopt;
    return owner->toObjectRef().getAttr(node->s(c10::attr::name));
  }

  const Value* const self_;
  const Module& module_;
  std::vector<std::string> calls_;
  std::vector<std::string> violations_;
};

std::vector<std::string> WantedCalls(int64_t num_layers) {
  std::vector<std::string> wanted;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    wanted.push_back(CallName("block", layer));
    wanted.push_back(CallName("attention", layer));
  }
  wanted.push_back(CallName("block", num_layers));
  return wanted;
}

std::vector<std::string> CallViolations(const std::vector<std::string>& calls, int64_t num_layers) {
  std::vector<std::string> violations;
  const std::vector<std::string> wanted = WantedCalls(num_layers);
  for (const std::string& name : wanted) {
    const auto count = absl::c_count(calls, name);
    if (count == 0) violations.push_back(absl::StrCat(name, " is not called"));
    if (count > 1) violations.push_back(absl::StrCat(name, " is called ", count, " times"));
  }
  for (const std::string& name : std::set<std::string>(calls.begin(), calls.end())) {
    if (!absl::c_linear_search(wanted, name)) {
      violations.push_back(
          absl::StrCat(name, " is called, but the manifest has ", num_layers, " layers"));
    }
  }
  if (violations.empty() && calls != wanted) {
    violations.push_back(absl::StrCat("the calls come in the order ", absl::StrJoin(calls, ", ")));
  }
  return violations;
}

std::vector<std::string> SignatureViolations(const Graph& graph) {
  const auto types = [](auto values) {
    return absl::StrJoin(values, ", ", [](std::string* out, const Value* value) {
      absl::StrAppend(out, value->type()->annotation_str());
    });
  };
  const std::string inputs = types(graph.inputs().slice(1)), outputs = types(graph.outputs());
  if (inputs == "Tensor, Tensor, Tensor" && outputs == "Tensor") return {};
  return {absl::StrCat("forward takes (", inputs, ") and returns ", outputs,
                       "; it must take three tensors, token_ids, positions and last, and return "
                       "one, the logits")};
}

std::string Describe(const at::Tensor& tensor) {
  return absl::StrCat(c10::toString(tensor.scalar_type()), " [",
                      absl::StrJoin(tensor.sizes(), ", "), "]");
}

// Bytes of memory behind the tensor. What a storage says of its length is what the file says of it,
// and the record it was read from may be shorter.
int64_t BytesBehind(const at::Tensor& tensor) {
  if (IsMapped(tensor)) return static_cast<int64_t>(tensor.storage().nbytes());
  const size_t allocated = malloc_usable_size(const_cast<void*>(tensor.storage().data()));
  return static_cast<int64_t>(std::min(allocated, tensor.storage().nbytes()));
}

// Whether every element that offset, sizes and strides name is there. LibTorch takes a file's word
// for them.
bool LiesInMemory(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.numel() == 0) return true;
  int64_t last = tensor.storage_offset();
  bool overflows = last < 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    int64_t span = 0;
    overflows |= tensor.size(i) < 0 || tensor.stride(i) < 0 ||
                 __builtin_mul_overflow(tensor.size(i) - 1, tensor.stride(i), &span) ||
                 __builtin_add_overflow(last, span, &last);
  }
  const auto itemsize = static_cast<int64_t>(tensor.dtype().itemsize());
  return !overflows && last < BytesBehind(tensor) / itemsize;
}

// What is wrong with a tensor as the file has it, or nothing.
std::string TensorFault(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided) {
    // Torch takes a file's word for their indices.
    return absl::StrCat("a tensor is ", c10::str(tensor.layout()), ", not dense");
  }
  if (tensor.is_quantized()) {
    return absl::StrCat("a tensor is ", c10::toString(tensor.scalar_type()),
                        ": only epikv::quantized_linear's integers are served");
  }
  if (LiesInMemory(tensor)) return "";
  return absl::StrCat("a tensor reaches beyond its data: ", Describe(tensor), " in ",
                      BytesBehind(tensor), " bytes");
}

void AddMemoryViolations(const c10::IValue& value, std::set<std::string>& violations) {
  value.visit([&violations](const c10::IValue& inner) {
    if (!inner.isTensor() || !inner.toTensor().defined()) return false;
    std::string fault = TensorFault(inner.toTensor());
    if (!fault.empty()) violations.insert(std::move(fault));
    return false;
  });
}

void AddMemoryViolations(const Block* block, std::set<std::string>& violations) {
  for (const Node* node : block->nodes()) {
    for (const Block* inner : node->blocks()) AddMemoryViolations(inner, violations);
    if (node->kind() != c10::prim::Constant) continue;
    const std::optional<c10::IValue> value = torch::jit::toIValue(node->output());
    if (value.has_value()) AddMemoryViolations(*value, violations);
  }
}

// What is wrong with the weight of the last norm; empty: nothing.
std::string FinalNormViolation(const std::map<std::string, at::Tensor>& parameters,
                               const Manifest& manifest) {
  if (!manifest.final_norm.has_value()) return "";
  const std::string& name = manifest.final_norm->weight;
  const auto found = parameters.find(name);
  if (found == parameters.end()) {
    return absl::StrCat("final_norm's weight '", name, "' is not a parameter of the module");
  }
  const at::Tensor& weight = found->second;
  if (weight.is_floating_point() && weight.sizes() == at::IntArrayRef({manifest.hidden_size})) {
    return "";
  }
  return absl::StrCat("final_norm's weight '", name, "' is ", Describe(weight), ", not [",
                      manifest.hidden_size, "] of floating point");
}

// Passes the residual through, answers attention with its own values, and notes what does not have
// the manifest's shape.
class ProbeHooks : public ForwardHooks {
 public:
  ProbeHooks(const Manifest& manifest, int64_t num_rows)
      : manifest_(manifest), num_rows_(num_rows) {}

  at::Tensor Block(const at::Tensor& residual, int64_t layer) override {
    calls_.push_back(CallName("block", layer));
    Expect(calls_.back(), "residual", residual, {manifest_.hidden_size}, Type::kAny);
    return residual;
  }

  at::Tensor Attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& normed, int64_t layer) override {
    const std::string name = CallName("attention", layer);
    calls_.push_back(name);
    const LayerFacts& facts =
        manifest_.layers[std::clamp<int64_t>(layer, 0, manifest_.num_layers() - 1)];
    Expect(name, "q", q, {manifest_.num_heads, facts.key_width}, Type::kModel);
    Expect(name, "k", k, {manifest_.num_kv_heads, facts.key_width}, Type::kModel);
    Expect(name, "v", v, {manifest_.num_kv_heads, facts.value_width}, Type::kModel);
    Expect(name, "normed", normed, {manifest_.hidden_size}, Type::kAny);
    return v.repeat_interleave(manifest_.num_heads / manifest_.num_kv_heads, 1);
  }

  std::vector<std::string>& violations() { return violations_; }
  const std::vector<std::string>& calls() const { return calls_; }

 private:
  enum class Type { kModel, kAny };  // the manifest's dtype; any floating-point type

  void Expect(const std::string& call, absl::string_view argument, const at::Tensor& tensor,
              std::vector<int64_t> sizes, Type type) {
    sizes.insert(sizes.begin(), num_rows_);
    const at::ScalarType dtype = ScalarTypeOf(manifest_.dtype);
    const bool type_agrees =
        type == Type::kModel ? tensor.scalar_type() == dtype : tensor.is_floating_point();
    if (type_agrees && tensor.sizes() == at::IntArrayRef(sizes)) return;
    violations_.push_back(absl::StrCat(call, " gets ", argument, " as ", Describe(tensor), ", not ",
                                       c10::toString(dtype), " [", absl::StrJoin(sizes, ", "),
                                       "]"));
  }

  const Manifest& manifest_;
  const int64_t num_rows_;
  std::vector<std::string> violations_, calls_;
};

}  // namespace

std::vector<std::string> ParameterViolations(const std::map<std::string, at::Tensor>& parameters,
                                             const Manifest& manifest) {
  std::vector<std::string> violations;
  std::vector<std::string> of_other_type;
  for (const auto& [name, tensor] : parameters) {
    // Scales and biases may be wider than the weights.
    const bool matrix = tensor.dim() > 1 && tensor.is_floating_point();
    if (matrix && tensor.scalar_type() != ScalarTypeOf(manifest.dtype)) {
      of_other_type.push_back(absl::StrCat(name, " (", c10::toString(tensor.scalar_type()), ")"));
    }
  }
  if (!of_other_type.empty()) {
    violations.push_back(
        absl::StrCat(of_other_type.size(), " weights are not of the manifest's dtype ",
                     c10::toString(ScalarTypeOf(manifest.dtype)), ", first ", of_other_type[0]));
  }
  for (int64_t layer = 0; layer < manifest.num_layers(); ++layer) {
    const LayerFacts& facts = manifest.layers[layer];
    std::vector<int64_t> wanted = {manifest.hidden_size, manifest.num_heads * facts.value_width};
    const auto found = parameters.find(facts.output_projection);
    const bool of_4_bits = found != parameters.end() && found->second.scalar_type() == at::kByte;
    if (of_4_bits) wanted[1] /= 2;  // two in a byte (epikv::quantized_linear)
    if (found == parameters.end()) {
      violations.push_back(absl::StrCat("layer ", layer, "'s output_projection '",
                                        facts.output_projection,
                                        "' is not a parameter of the module"));
    } else if (found->second.sizes() != at::IntArrayRef(wanted)) {
      violations.push_back(absl::StrCat("layer ", layer, "'s output_projection '",
                                        facts.output_projection, "' is [",
                                        absl::StrJoin(found->second.sizes(), ", "), "], not [",
                                        absl::StrJoin(wanted, ", "), "]"));
    }
  }
  std::string of_norm = FinalNormViolation(parameters, manifest);
  if (!of_norm.empty()) violations.push_back(std::move(of_norm));
  return violations;
}

std::string LastLine(absl::string_view what) {
  what = what.substr(0, what.find("\nException raised from "));
  const std::vector<absl::string_view> lines = absl::StrSplit(what, '\n', absl::SkipWhitespace());
  return lines.empty() ? std::string("unknown error") : std::string(lines.back());
}

ContractReport CheckContract(const Module& module, const Manifest& manifest) {
  const std::shared_ptr<Graph> graph = module.get_method("forward").graph();
  ContractReport report;
  std::set<std::string> beyond;
  AddMemoryViolations(module._ivalue(), beyond);
  AddMemoryViolations(graph->block(), beyond);
  report.violations = SignatureViolations(*graph);
  report.violations.insert(report.violations.end(), beyond.begin(), beyond.end());
  GraphReader reader(*graph, module);
  reader.Read(graph->block(), "");
  report.runnable = report.violations.empty();
  std::map<std::string, at::Tensor> parameters;
  for (const auto& [name, tensor] : module.named_parameters()) parameters.emplace(name, tensor);
  for (const std::vector<std::string>& more :
       {reader.violations(), CallViolations(reader.calls(), manifest.num_layers()),
        ParameterViolations(parameters, manifest)}) {
    report.violations.insert(report.violations.end(), more.begin(), more.end());
  }
  return report;
}

std::vector<std::string> ProbeViolations(const Model& model, bool counts_calls) {
  const Manifest& manifest = model.manifest();
  const int64_t last_token = manifest.vocab_size - 1;
  const int64_t last_position = manifest.context_length - 1;
  const at::Tensor token_ids = at::tensor({int64_t{0}, last_token, int64_t{0}});
  const at::Tensor positions = at::tensor({int64_t{0}, last_position, int64_t{0}});
  const at::Tensor last = at::tensor({int64_t{1}, int64_t{2}});
  ProbeHooks hooks(manifest, token_ids.numel());
  std::vector<std::string>& violations = hooks.violations();
  try {
    const at::Tensor logits = model.Forward(token_ids, positions, last, hooks);
    const std::vector<int64_t> wanted = {last.numel(), manifest.vocab_size};
    if (logits.scalar_type() != at::kFloat || logits.sizes() != at::IntArrayRef(wanted)) {
      violations.push_back(absl::StrCat("the logits of 2 of 3 rows are ", Describe(logits),
                                        ", not Float [", absl::StrJoin(wanted, ", "), "]"));
    } else if (!at::isfinite(logits).all().item<bool>()) {
      violations.push_back("the logits of a probe are not finite");
    }
    if (counts_calls) {
      for (std::string& of : CallViolations(hooks.calls(), manifest.num_layers())) {
        violations.push_back(std::move(of));
      }
    }
  } catch (const std::exception& error) {
    violations.push_back(absl::StrCat("a forward with token ", last_token, " at position ",
                                      last_position, " failed: ", LastLine(error.what())));
  }
  return std::move(violations);
}

}  // namespace epikv
