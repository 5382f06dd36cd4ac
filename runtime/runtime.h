#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "policies/spec.h"
#include "runtime/kernels/kv_format.h"
#include "runtime/model/manifest.h"
#include "runtime/step/drafter.h"
#include "runtime/step/step_executor.h"

// Where torch begins: the one door from the server to what includes it.

namespace epikv {

class Ranks;

struct RuntimeOptions {
  std::string model_path;  // file that `epikv export` wrote
  // Folder of files that `epikv calibrate` wrote for this model: all of its *.json; empty: none.
  std::string artefact_dir;
  // File of a smaller model that guesses for requests of GuessSource::kDraft; empty: none.
  std::string draft_model;
  std::string device = "cpu";     // where it runs: "cpu", "cuda"
  int64_t threads = 0;            // of the engine; 0: CPU quota minus one, at least one
  int64_t kv_pool_bytes = 0;      // 0: kv_memory_share of what is left after weights and scratch
  double kv_memory_share = 0.5;   // in (0, 1]
  int64_t kv_tier_bytes = 0;      // below the pool; 0: there is no tier
  std::string kv_tier_dir;        // where it lies (OpenTierStore)
  int64_t max_step_tokens = 512;  // bounds the scratch of a step
  int64_t prefill_chunk_tokens = 256;
  int64_t max_running_requests = 256;
  bool deterministic = false;
  bool trusts_code = false;            // loads compiled models, whose code does what it likes
  KvDType kv_dtype = KvDType::kModel;  // K and V are cached as
  std::string decode_kernel = "auto", prefill_kernel = "auto";  // of the CPU
  int64_t mass_interval = 0;                                    // see ExecutorOptions
  // This process's, where several serve the model (tensor parallel): all of them load it at once,
  // with these options. Pool and threads are of each. Null: it serves alone.
  std::shared_ptr<Ranks> ranks;
  // Hears what is being done, before each long stage of loading ("warming up"). May be null.
  std::function<void(absl::string_view)> progress;
};

// A model that is loaded, warmed up and ready to run steps.
struct LoadedModel {
  Manifest manifest;
  ModelShape shape;            // the manifest's, artefacts added; without phrases (phrases.h)
  std::string tokenizer_json;  // the model file's tokenizer.json
  std::string chat_json;       // and its chat.json; empty: it has none
  // And its chat_template.json: the checkpoint's own template with the special tokens that it
  // knows. Nothing here runs it. Empty: it has none.
  std::string chat_template_json;
  PolicyCatalog policies;  // of this build
  std::unique_ptr<StepExecutor> executor;
  std::unique_ptr<Drafter> drafter;  // null: there is no draft model
  std::string draft_model;           // its name
  // EmbeddingOf this model's. Any thread, while the executor lives.
  // Null where several ranks serve it.
  std::function<std::vector<float>(absl::Span<const int32_t>)> embed;
  int64_t kv_capacity_bytes = 0, tier_capacity_bytes = 0;
  KvDType kv_dtype = KvDType::kModel;
  int64_t weight_bytes = 0;   // in memory, as served
  int64_t scratch_bytes = 0;  // of the model's own tensors in the largest forward
  int64_t threads = 0;
  int64_t ranks = 1;   // that serve it; the manifest is of one's shard
  std::string device;  // "cpu", "cuda"
  std::string decode_kernel, prefill_kernel;
  // What was found and chosen (weights, pool, kernels and their times), a line each, for people.
  std::vector<std::string> description;
  // Runs first on the thread that will call the executor: it sets that thread's team size, and
  // c10::InferenceMode as long as the thread lives.
  std::function<void()> on_engine_thread_start;
};

std::string TorchVersion();

// Call once, before other threads and before LoadModel. oneDNN and the layer between it and torch
// each keep the last 1024 kernels, one for each shape of each linear layer, at about 250 KB: under
// traffic of ever new step sizes the process would grow by half a GB. Shapes come again soon or
// never, so that 64 are as fast. Left alone where the environment says how many.
void BoundKernelCaches();

// The eviction policies of this build.
PolicyCatalog BuiltPolicies();

// Loads the file, checks the model contract (DESIGN section 3), takes the KV pool, measures kernels
// and warms every shape up. The error names every violation. DATA_LOSS: the file is damaged.
absl::StatusOr<LoadedModel> LoadModel(const RuntimeOptions& options);

// The life of a rank that is not rank 0: loads its shard, calls `on_loaded`, and serves until rank
// 0 has ended. Not OK: why it could not, which rank 0 is told as well.
absl::Status ServeRank(const RuntimeOptions& options, absl::FunctionRef<void()> on_loaded);

}  // namespace epikv
