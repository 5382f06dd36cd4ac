#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "runtime/model/manifest.h"
#include "runtime/model/operators.h"

namespace epikv {

class Ranks;

// What a loaded model says of itself.
struct ModelFacts {
  Manifest manifest;
  std::string tokenizer_json;
  std::string chat_json;           // empty: the file is older than chat formats
  std::string chat_template_json;  // empty: the file has none
  int64_t weight_bytes = 0;        // in memory, as served
  at::Device device = at::kCPU;
  bool writes_in_place = false;  // its code changes tensors that it has made
  std::string description;       // one line, for the log: dtype, kernels
  std::shared_ptr<Ranks> ranks;  // of a shard; null: the model is whole
};

// A decoder ready to run. Immutable: any thread may call it, several at once.
class Model {
 public:
  explicit Model(ModelFacts facts) : facts_(std::move(facts)) {}
  virtual ~Model() = default;

  // One forward over n packed tokens of all sequences: token_ids [n] and positions [n], and the
  // rows `last` [b] whose logits are wanted, all int64, on the model's device or the CPU. Returns
  // float32 [b, vocab], on the model's device. Calls `hooks` on this thread, in layer order, each
  // once. Throws what torch and the hooks throw.
  //
  // The bits of a row depend on its own tokens, n and b; on nobody else's tokens, not on its place.
  virtual at::Tensor Forward(const at::Tensor& token_ids, const at::Tensor& positions,
                             const at::Tensor& last, ForwardHooks& hooks) const = 0;

  // W_O of a layer, [hidden, heads * value_width]. May be made at each call: keep it if needed.
  virtual at::Tensor output_projection(int64_t layer) const = 0;

  // The residual stream after the last block, [n, hidden], as the norm before the head leaves it.
  // Same shape and type. Requires Manifest::final_norm.
  virtual at::Tensor FinalNormed(const at::Tensor& residual) const = 0;

  const Manifest& manifest() const { return facts_.manifest; }
  const std::string& tokenizer_json() const { return facts_.tokenizer_json; }
  const std::string& chat_json() const { return facts_.chat_json; }
  const std::string& chat_template_json() const { return facts_.chat_template_json; }
  int64_t weight_bytes() const { return facts_.weight_bytes; }
  at::Device device() const { return facts_.device; }
  bool writes_in_place() const { return facts_.writes_in_place; }
  const std::string& description() const { return facts_.description; }
  const std::shared_ptr<Ranks>& ranks() const { return facts_.ranks; }

 private:
  const ModelFacts facts_;
};

struct ModelOptions {
  at::Device device = at::kCPU;
  // On the CPU, pack linear weights where the machine has kernels for it.
  bool prepack = true;
  // Of a shard of the model: this rank's, whose forwards all ranks run together. Null: it is whole.
  std::shared_ptr<Ranks> ranks;
  // Whether compiled models are loaded, whose code may do whatever this process may. Nothing of a
  // TorchScript file runs but operators of a list (allowed_operators.h).
  bool trusts_code = false;
};

// Loads a file that keeps the model contract (DESIGN section 3), of TorchScript or compiled
// (tools/epikv/export/compiled.py), and runs one small forward. NOT_FOUND; DATA_LOSS: the file is
// damaged; RESOURCE_EXHAUSTED: too little memory; FAILED_PRECONDITION: it breaks the contract, and
// in what, everything at once; or it cannot be served so.
absl::StatusOr<std::unique_ptr<Model>> LoadModelFile(const std::string& path,
                                                     const ModelOptions& options = {});

}  // namespace epikv
