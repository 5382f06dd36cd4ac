#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "policies/registry.h"
#include "runtime/admission.h"
#include "runtime/engine.h"
#include "runtime/executor.h"
#include "tests/law_model.h"

namespace epikv {

// What one request got.
struct Transcript {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  std::vector<bool> greedy;
  std::vector<std::vector<TokenLogprob>> top_logprobs;
  PromptLogprobs prompt;  // all its parts
  std::string text;
  std::vector<std::vector<float>> residual_steps;
  std::vector<EvictionTrace> evictions;
  std::optional<Finished> finished;
  // Of several completions: each one's own. What is above is of all, as it came.
  std::vector<Transcript> completions;

  bool ok() const { return finished.has_value() && finished->status.ok(); }
};

struct HarnessOptions {
  int64_t kv_pool_bytes = 64 << 20;
  int64_t max_step_tokens = 512;
  int64_t prefill_chunk_tokens = 256;
  bool deterministic = false;
  bool device_path = false;      // see ExecutorOptions
  int64_t max_prefix_bytes = 0;  // of the pool, for cached prefixes
  DecodeKernel decode_kernel = DecodeKernel::kBatch;
  PrefillKernel prefill_kernel = PrefillKernel::kBatch;
  KvDType kv_dtype = KvDType::kModel;
  PolicyCatalog policies = AllPolicies();
  int64_t mass_interval = 0;  // see ExecutorOptions
  bool end_tokens = true;     // false: streams go on to their length, whatever they say
  int64_t max_running_requests = 256;
  std::function<absl::Time()> now = absl::Now;
  // What the engine gets in place of the executor; null: the executor itself.
  std::function<std::unique_ptr<StepExecutor>(std::unique_ptr<StepExecutor>)> wrap;
};

// An engine over a real model file, stepped by hand: for tests of what it computes.
class EngineHarness {
 public:
  explicit EngineHarness(std::shared_ptr<const Model> model, HarnessOptions options = {});
  // Ends the test program if the model does not load. Loaded once a path.
  explicit EngineHarness(const std::string& model_path, HarnessOptions options = {});

  // Queues a request; the transcript fills as Step runs.
  std::shared_ptr<Transcript> Submit(RequestOptions options);
  // The same of a request that Admission has resolved. `ready`: whether its client reads; null: it
  // always does. idle: by Engine::SubmitIdle.
  std::shared_ptr<Transcript> Submit(Request request, std::function<bool()> ready = nullptr,
                                     bool idle = false);
  // What Admission says of a request that it refuses.
  Rejection Refusal(RequestOptions options) const;
  // Steps until nothing can run.
  void RunAll();
  // Submit, RunAll.
  Transcript Run(RequestOptions options);

  Engine& engine() { return *engine_; }
  const Admission& admission() const { return *admission_; }
  const Manifest& manifest() const { return model_->manifest(); }
  LawModel& model() { return *model_; }
  const Executor& executor() const { return *executor_; }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  // Called after every step.
  void OnStep(std::function<void()> check) { on_step_ = std::move(check); }
  // Of every round that was measured, SettleOutcome::attention_mass.
  const std::vector<double>& masses() const { return observer_.masses; }

 private:
  LawModel* model_ = nullptr;           // owned by the executor
  const Executor* executor_ = nullptr;  // owned by the engine
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<Admission> admission_;
  struct Observer final : EngineObserver {
    void OnEvicted(const EvictedStats& evicted) override {
      if (evicted.attention_mass.has_value()) masses.push_back(*evicted.attention_mass);
    }
    std::vector<double> masses;
  } observer_;
  std::unique_ptr<Engine> engine_;
  std::function<void()> on_step_;
  int64_t next_id_ = 0;
};

}  // namespace epikv
