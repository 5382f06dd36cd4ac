#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "runtime/step/attention.h"
#include "runtime/device/device_forward.h"
#include "runtime/kv/kv_pool.h"
#include "runtime/model/model.h"
#include "runtime/model/operators.h"
#include "runtime/kv/prefix_cache.h"
#include "runtime/signals/query_moments.h"
#include "runtime/model/rope_table.h"
#include "runtime/signals/signals.h"
#include "runtime/step/step_executor.h"

namespace epikv {

struct OpenSequence;
struct StepItem;

struct ExecutorOptions {
  int64_t pool_rows = 0;
  DecodeKernel decode_kernel = DecodeKernel::kBatch;
  PrefillKernel prefill_kernel = PrefillKernel::kBatch;
  KvDType kv_dtype = KvDType::kModel;
  // Forwards run in ATen operations alone (DeviceForward), on whatever device the model is on. Not
  // with `deterministic`. False: on the CPU, where the model must be.
  bool device_path = false;
  // Forwards of exactly kDeterministicRows rows, so that a row's bits do not depend on the others.
  bool deterministic = false;
  // Prompts are cached for others in blocks of so many tokens; 0: they are not. Where the bits of
  // what follows shall not depend on it, a multiple of what prefill runs in at a time.
  int64_t prefix_block_tokens = 0;
  // Decoded tokens of a sequence between two rounds whose SettleOutcome::attention_mass is
  // measured; its first one is, too. 0: never.
  int64_t mass_interval = 0;
};
inline constexpr int64_t kDeterministicRows = 16;

// Runs steps on a Model: builds the packed batch, answers the model's two operators from the lanes,
// commits, samples, and lets policies observe and evict. Engine thread.
class Executor final : public StepExecutor, private ForwardHooks {
 public:
  Executor(std::unique_ptr<Model> model, ExecutorOptions options);
  ~Executor() override;

  absl::StatusOr<int64_t> Open(SequenceId id, const Request& request,
                               int64_t prefix_bytes) override;
  absl::StatusOr<std::vector<ForwardOutcome>> Forward(absl::Span<const WorkItem> items) override;
  std::vector<SettleOutcome> Settle(absl::Span<const WorkItem> items) override;
  absl::Status Fork(SequenceId parent, SequenceId child, const Request& request) override;
  CacheFacts Facts(SequenceId id) const override;
  void Close(SequenceId id) override;
  int64_t used_bytes() const override;
  bool lost() const override { return pool_.lost(); }
  int64_t prefix_bytes() const override { return prefixes_.bytes(); }
  void DropPrefixes() override { prefixes_.Clear(); }
  void AddMoves(StepStats& step) const override;
  void AddStageTimes(StepStats& step) const override;

  const KvPool& pool() const { return pool_; }
  const Model& model() const { return *model_; }
  const AttentionCounts& attention_counts() const { return attention_.counts(); }
  // Null: forwards run on the CPU.
  const DeviceForward* device() const { return device_.get(); }

 private:
  struct Tap {
    StepItem* item = nullptr;
    int64_t place = 0;  // in the sequence's ResidualTap
  };

  at::Tensor Block(const at::Tensor& residual, int64_t layer) override;
  at::Tensor Attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& normed, int64_t layer) override;

  std::vector<StepItem> Prepare(absl::Span<const WorkItem> items);
  bool MassDue(const OpenSequence& sequence, const WorkItem& work) const;
  void TakeResiduals(const at::Tensor& residual, int64_t layer);
  absl::StatusOr<int64_t> LoadPrefix(OpenSequence& sequence,
                                     absl::Span<const PrefixCache::Block> blocks);
  // Runs the model over consecutive items and leaves their logits with them.
  void RunModel(absl::Span<StepItem> items);
  void Append(absl::Span<const StepItem> items, const at::Tensor& q, const at::Tensor& k,
              const at::Tensor& v, int64_t layer, at::Tensor& rotated);
  void TurnKeys(StepItem& item, int64_t layer);
  void FindHidden(StepItem& item, int64_t layer);
  static absl::Span<const float> LogitsOf(const StepItem& item, int64_t row);
  static absl::StatusOr<OutputToken> TakeOutput(const StepItem& item, int64_t i,
                                                const SamplingParams& sampling);
  static absl::StatusOr<PromptLogprobs> TakePromptLogprobs(const StepItem& item);
  ForwardOutcome Finish(StepItem& item);
  void KeepPrefix(const StepItem& item);
  SettleOutcome SettleOne(OpenSequence& sequence, const WorkItem& item);
  absl::Status Observe(OpenSequence& sequence, const WorkItem& item, CacheView& view);
  absl::Status RunRound(OpenSequence& sequence, const WorkItem& item, CacheView& view,
                        SettleOutcome& outcome);

  const std::unique_ptr<Model> model_;
  const ExecutorOptions options_;
  const ModelShape shape_;
  const std::vector<at::Tensor> output_grams_;  // CacheView::output_gram, [layers]
  std::vector<RopeTable> ropes_;
  const epikv::Attention attention_;
  KvPool pool_;
  PrefixCache prefixes_;
  std::unordered_map<SequenceId, std::unique_ptr<OpenSequence>> open_;

  // The forward that runs.
  absl::Span<StepItem> running_;
  std::vector<std::vector<Tap>> taps_;  // by block number
  StepStats times_;                     // of the last step's parts

  // SettleOutcome::attention_mass is measured of at most one sequence a step.
  std::optional<SequenceId> mass_of_;  // in the last forward
  LaneRowsOfStep mass_rows_;           // its newest query's attention, of all lanes
  std::vector<float> mass_logits_;     // AttentionItem::logits

  std::unique_ptr<DeviceForward> device_;
};

}  // namespace epikv
