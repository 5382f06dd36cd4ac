#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "runtime/model/manifest.h"
#include "runtime/model/model.h"

namespace torch::jit {
struct Module;
}

namespace epikv {

// In what a module breaks the model contract. Empty: in nothing.
struct ContractReport {
  std::vector<std::string> violations;
  bool runnable = true;  // the signature agrees and tensors are whole: it may be probed
};

// Reads a module of allowed operators (module_reader.h): the signature of its forward, the calls of
// block and attention and their order, its parameters. `forward` must be inlined and not yet
// frozen: freezing merges and deletes calls of epikv::block.
ContractReport CheckContract(const torch::jit::Module& module, const Manifest& manifest);

// What the manifest says of a model's parameters, by their names, and is not so.
std::vector<std::string> ParameterViolations(const std::map<std::string, at::Tensor>& parameters,
                                             const Manifest& manifest);

// What one small forward shows: shapes and types at the operators, the logits; the calls, if
// `counts_calls`: where CheckContract cannot read them.
std::vector<std::string> ProbeViolations(const Model& model, bool counts_calls = false);

// Of what Model::Forward has thrown, the line that says what happened: TorchScript's traceback
// stands before it, and LibTorch's stack behind it.
std::string LastLine(absl::string_view what);

}  // namespace epikv
