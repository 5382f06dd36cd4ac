#include <ATen/ATen.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/frontend/error_report.h>
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/freeze_module.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "runtime/base/scalar_type.h"
#include "runtime/model/loaders.h"
#include "runtime/model/model.h"
#include "runtime/model/model_contract.h"
#include "runtime/model/model_file.h"
#include "runtime/model/model_shard.h"
#include "runtime/model/module_reader.h"
#include "runtime/model/packed_linear.h"
#include "runtime/model/rank_operators.h"

namespace epikv {
namespace {

using torch::jit::Block;
using torch::jit::Graph;
using torch::jit::Module;
using torch::jit::Node;

// What a model file holds.
struct Contents : ModelTexts {
  Module module;
};

// A module's forward as one graph of three inputs, its weights constants inside.
struct FrozenForward {
  std::shared_ptr<Graph> graph;
  // The functions that were inlined: an error's traceback names them, by plain pointers.
  std::shared_ptr<torch::jit::CompilationUnit> functions;
};

class NoWarnings final : public c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

class TorchScriptModel final : public FileModel {
 public:
  TorchScriptModel(ModelFacts facts, NamedWeights named, const FrozenForward& forward)
      : FileModel(std::move(facts), std::move(named)),
        functions_(forward.functions),
        code_(forward.graph, "forward") {}

  // Straight through the interpreter: no executor rewrites the graph on the way, or profiles it.
  at::Tensor Forward(const at::Tensor& token_ids, const at::Tensor& positions,
                     const at::Tensor& last, ForwardHooks& hooks) const override {
    const c10::InferenceMode inference;
    const HooksScope scope(hooks);
    const RanksScope exchanges(ranks().get());
    static NoWarnings none;  // a file's code may warn, with what it pleases
    const c10::WarningUtils::WarningHandlerGuard quiet(&none);
    torch::jit::Stack stack = {token_ids.to(device()), positions.to(device()), last.to(device())};
    torch::jit::InterpreterState(code_).run(stack);
    return stack.back().toTensor();
  }

 private:
  const std::shared_ptr<torch::jit::CompilationUnit> functions_;
  const torch::jit::Code code_;
};

// What TorchScript's compiler says is wrong, without the excerpt of the code that follows.
std::string CompilerMessage(absl::string_view what) {
  const absl::string_view message = what.substr(0, what.find("\n:\n"));
  return absl::StrJoin(absl::StrSplit(message, '\n', absl::SkipWhitespace()), " ");
}

// Of an undamaged archive. The extra files come first: a manifest that is wrong is told before the
// weights are read.
absl::StatusOr<Contents> Read(const std::string& path, bool maps) {
  Contents contents;
  caffe2::serialize::PyTorchStreamReader reader(path);
  const std::vector<std::string> violations = ReadTexts(reader, contents);
  if (!violations.empty()) return Broken(path, violations);
  ReadModule read = ReadModuleWithoutRunning(reader, maps ? path : "");
  if (!read.violations.empty()) return Broken(path, read.violations);
  contents.module = std::move(read.module);
  return contents;
}

bool WritesConstants(const Block* block, const torch::jit::AliasDb& aliases) {
  for (const Node* node : block->nodes()) {
    for (const Block* inner : node->blocks()) {
      if (WritesConstants(inner, aliases)) return true;
    }
    if (node->kind() == c10::prim::Constant && aliases.hasWriters(node)) return true;
  }
  return false;
}

bool WritesInPlace(const Block* block) {
  for (const Node* node : block->nodes()) {
    for (const Block* inner : node->blocks()) {
      if (WritesInPlace(inner)) return true;
    }
    const c10::FunctionSchema* const schema = node->maybeSchema();
    if (schema != nullptr && schema->is_mutable()) return true;
  }
  return false;
}

// Dropout, unless it is known to be off.
bool DrawsRandomNumbers(const Block* block) {
  for (const Node* node : block->nodes()) {
    for (const Block* inner : node->blocks()) {
      if (DrawsRandomNumbers(inner)) return true;
    }
    const absl::string_view kind = node->kind().toQualString();
    if (kind == "aten::dropout" || kind == "aten::dropout_") {
      const auto train = torch::jit::constant_as<bool>(node->input(2));
      if (train.value_or(true)) return true;
    }
    if (kind == "aten::scaled_dot_product_attention") {
      const auto dropout = torch::jit::constant_as<double>(node->input(4));
      if (dropout.value_or(1) != 0) return true;
    }
  }
  return false;
}

// Takes the last handle to the module, so that the graph alone holds the weights.
absl::StatusOr<FrozenForward> Freeze(Module module) {
  try {
    torch::jit::freeze_module_inplace(&module);
  } catch (const std::exception& error) {
    return absl::FailedPreconditionError(
        absl::StrCat("forward cannot be frozen: ", FirstSentence(error.what())));
  }
  std::shared_ptr<Graph> graph = module.get_method("forward").graph();
  if (graph->inputs()[0]->hasUses()) {
    return absl::FailedPreconditionError("forward changes the module; a module keeps no state");
  }
  if (DrawsRandomNumbers(graph->block())) {
    return absl::FailedPreconditionError(
        "forward draws random numbers: its dropout is not off; export the module after eval()");
  }
  graph->eraseInput(0);
  const torch::jit::AliasDb aliases(graph);
  if (WritesConstants(graph->block(), aliases)) {
    return absl::FailedPreconditionError("forward changes a constant; a module keeps no state");
  }
  return FrozenForward{.graph = graph, .functions = module._ivalue()->compilation_unit()};
}

int64_t ConstantBytes(const Block* block) {
  int64_t bytes = 0;
  for (const Node* node : block->nodes()) {
    for (const Block* inner : node->blocks()) bytes += ConstantBytes(inner);
    if (node->kind() == c10::prim::Constant && node->hasAttribute(c10::attr::value) &&
        node->kindOf(c10::attr::value) == torch::jit::AttributeKind::t) {
      bytes += static_cast<int64_t>(node->t(c10::attr::value).nbytes());
    }
  }
  return bytes;
}

// Tensors on a device, by their former addresses.
using Moved = std::unordered_map<const void*, at::Tensor>;

// Moves the graph's tensors to a device, one after another, each once however often it is used.
void MoveConstants(Block* block, at::Device device, Moved& moved) {
  auto move = [&](const at::Tensor& tensor) {
    at::Tensor& there = moved[tensor.const_data_ptr()];
    const bool same = there.defined() && there.dtype() == tensor.dtype() &&
                      there.sizes() == tensor.sizes() && there.strides() == tensor.strides();
    if (!same) there = tensor.to(device);
    return there;
  };
  for (Node* node : block->nodes()) {
    for (Block* inner : node->blocks()) MoveConstants(inner, device, moved);
    if (node->kind() != c10::prim::Constant || !node->hasAttribute(c10::attr::value)) continue;
    if (node->kindOf(c10::attr::value) == torch::jit::AttributeKind::t) {
      node->t_(c10::attr::value, move(node->t(c10::attr::value)));
    } else if (node->kindOf(c10::attr::value) == torch::jit::AttributeKind::ts) {
      std::vector<at::Tensor> tensors = node->ts(c10::attr::value);
      for (at::Tensor& tensor : tensors) tensor = move(tensor);
      node->ts_(c10::attr::value, std::move(tensors));
    }
  }
}

// NamedWeights of a module whose weights may still be split, packed and moved.
struct NamedParameters {
  std::vector<at::Tensor> output_projections;  // [layers]
  at::Tensor final_norm;
};

NamedParameters ParametersOf(const Module& module, const Manifest& manifest) {
  std::unordered_map<std::string, at::Tensor> parameters;
  for (const auto& [name, tensor] : module.named_parameters()) parameters.emplace(name, tensor);
  NamedParameters named;
  for (const LayerFacts& layer : manifest.layers) {
    named.output_projections.push_back(parameters[layer.output_projection]);
  }
  if (manifest.final_norm.has_value()) named.final_norm = parameters[manifest.final_norm->weight];
  return named;
}

// Takes the last handle to the module, so that weights are freed as they are packed.
absl::StatusOr<std::unique_ptr<Model>> Compile(Contents contents, const ModelOptions& options) {
  NamedParameters parameters = ParametersOf(contents.module, contents.manifest);
  absl::StatusOr<FrozenForward> forward = Freeze(std::move(contents.module));
  if (!forward.ok()) return forward.status();
  Graph& graph = *forward->graph;
  if (options.ranks != nullptr) {
    Shards shards;
    if (absl::Status cut = CutShard(graph, *options.ranks, contents.manifest, shards); !cut.ok()) {
      return cut;
    }
    for (at::Tensor& weight : parameters.output_projections) {
      if (!weight.defined()) continue;
      const auto found = shards.find(weight.const_data_ptr());
      if (found == shards.end()) {
        return absl::FailedPreconditionError("an output_projection was not split");
      }
      weight = found->second;
    }
    if (parameters.final_norm.defined()) parameters.final_norm = parameters.final_norm.clone();
  }
  const bool on_cpu = options.device.is_cpu();
  if (!on_cpu && !contents.manifest.quantization.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "its linears of ", contents.manifest.quantization,
        " are for the CPU; export it without --quantize to serve it on ", options.device.str()));
  }
  const PackedLinears packed = PackLinears(graph, options.prepack, options.device);
  Moved moved;
  if (!on_cpu) MoveConstants(graph.block(), options.device, moved);
  const at::ScalarType dtype = ScalarTypeOf(contents.manifest.dtype);
  NamedWeights named;
  for (at::Tensor& weight : parameters.output_projections) {
    const void* const address = weight.defined() ? weight.const_data_ptr() : nullptr;
    if (const auto found = packed.dense.find(address); found != packed.dense.end()) {
      named.output_projections.emplace_back([make = found->second, dtype] { return make(dtype); });
      continue;
    }
    if (weight.defined() && !weight.is_floating_point()) {
      return absl::FailedPreconditionError(
          "an output_projection has integer weights, but is not the weight of an "
          "epikv::quantized_linear");
    }
    if (const auto found = moved.find(address); found != moved.end()) weight = found->second;
    named.output_projections.emplace_back([weight = std::move(weight)] { return weight; });
  }
  if (parameters.final_norm.defined()) {
    named.final_norm = parameters.final_norm.detach().to(options.device);
  }
  ModelFacts facts = FactsOf(std::move(contents));
  facts.weight_bytes = ConstantBytes(graph.block()) + packed.bytes;
  facts.device = options.device;
  facts.writes_in_place = WritesInPlace(graph.block());
  facts.ranks = options.ranks;
  const DType of = facts.manifest.dtype;
  facts.description = absl::StrCat(
      "TorchScript, ", DTypeName(of), on_cpu ? "" : absl::StrCat(", on ", options.device.str()),
      on_cpu || packed.packed > 0 ? Describe(packed, of, options.prepack) : "");
  return std::make_unique<TorchScriptModel>(std::move(facts), std::move(named), *forward);
}

absl::StatusOr<std::unique_ptr<Model>> LoadOrThrow(const std::string& path,
                                                   const ModelOptions& options) {
  // A shard is cut out of weights that never are in this process's own memory.
  absl::StatusOr<Contents> contents = Read(path, /*maps=*/options.ranks != nullptr);
  if (!contents.ok()) return contents.status();
  contents->module.eval();
  torch::jit::Inline(*contents->module.get_method("forward").graph());
  ContractReport report = CheckContract(contents->module, contents->manifest);
  if (!report.runnable) return Broken(path, report.violations);

  absl::StatusOr<std::unique_ptr<Model>> model = Compile(*std::move(contents), options);
  const std::vector<std::string> more =
      model.ok() ? ProbeViolations(**model)
                 : std::vector<std::string>{std::string(model.status().message())};
  report.violations.insert(report.violations.end(), more.begin(), more.end());
  if (!report.violations.empty()) return Broken(path, report.violations);
  return model;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> LoadTorchScript(const std::string& path,
                                                       const ModelOptions& options) {
  try {
    return LoadOrThrow(path, options);
  } catch (const torch::jit::ErrorReport& error) {
    return Broken(path,
                  {absl::StrCat("its code does not compile: ", CompilerMessage(error.what()))});
  } catch (const std::exception& error) {
    return CannotLoad(path, error);
  }
}

}  // namespace epikv
