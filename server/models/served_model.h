#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "runtime/admission/admission.h"
#include "runtime/constraints/constraint.h"
#include "runtime/engine/core_budget.h"
#include "runtime/engine/engine_thread.h"
#include "runtime/runtime.h"
#include "runtime/text/chat/chat_format.h"
#include "runtime/text/tokenizer.h"
#include "server/metrics/metrics.h"

namespace epikv {

// Clients, metrics, logs and health checks use them: what a model's name must do.
inline constexpr absl::string_view kModelNameRule =
    "have 1 to 128 bytes and no control character, quote or backslash";
bool IsModelName(absl::string_view name);

// Where a model comes from, and what it has of its own.
struct ModelSource {
  std::string path;                       // file that `epikv export` wrote
  std::string name;                       // clients call it by; empty: the manifest's
  std::string artefact_dir, draft_model;  // RuntimeOptions' of these names
  int64_t kv_pool_bytes = 0;
  int64_t threads = 0;
};

// How models are served, whichever they are.
struct ServingOptions {
  SchedulerOptions scheduler;
  int64_t max_running_requests = 256;
  double prefix_cache_share = .5;  // of the KV pool
  QueueLimits queue;
  QueueRule queue_rule;
  bool refuse_infeasible_deadlines = true;
  RequestDefaults defaults;
  bool deterministic = false;
};

// A model in service: what describes it, and its engine with a pool of its own. Immutable, but for
// what the engine does.
struct ServedModel : std::enable_shared_from_this<ServedModel> {
  std::string name;
  ModelSource source;
  std::shared_ptr<const Tokenizer> tokenizer;  // downloads of it may end after the model
  ChatFormats chat{"the model file has no chat format: export the model again"};
  std::string chat_template_json;  // LoadedModel's
  std::unique_ptr<ConstraintCompiler> constraints;
  std::unique_ptr<Admission> admission;
  std::function<std::vector<float>(absl::Span<const int32_t>)> embed;  // LoadedModel's
  int64_t kv_capacity_bytes = 0;
  int64_t threads = 0;
  int64_t ranks = 1;                // that serve it, each with a part of its KV heads
  std::string device, draft_model;  // LoadedModel's
  std::string decode_kernel, prefill_kernel;
  bool deterministic = false;
  std::shared_ptr<ModelMetrics> metrics;
  std::unique_ptr<EngineObserver> observer;
  std::unique_ptr<EngineThread> engine;  // last: it ends before what it uses

  int64_t lanes() const { return admission->shape().num_layers * admission->shape().num_kv_heads; }
  int64_t kv_capacity_tokens() const { return kv_capacity_bytes / admission->kv_bytes_per_token(); }
};

// Shared by the registry and the calls of the model, which end in unknown order.
using ModelPtr = std::shared_ptr<const ServedModel>;

// Whether both are one model, which may have gone.
inline bool IsModel(const std::weak_ptr<const ServedModel>& model,
                    const std::weak_ptr<const ServedModel>& other) {
  return !model.owner_before(other) && !other.owner_before(model);
}

// An error if the default policy is none of the catalog.
absl::Status CheckDefaults(const RequestDefaults& defaults, PolicyCatalog catalog);

// Changes the settings that a running model can take: queue and defaults. Not OK: nothing was
// changed.
absl::Status Apply(const ServingOptions& options, const ServedModel& model);

// Puts a loaded model behind an engine thread of its own. Everything given by reference outlives
// it.
absl::StatusOr<ModelPtr> MakeServedModel(LoadedModel loaded, ModelSource source,
                                         const ServingOptions& options, absl::Duration load,
                                         CoreBudget& cores, Metrics& metrics);

}  // namespace epikv
