#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "runtime/base/machine.h"
#include "runtime/executor/evicted_prefixes.h"
#include "runtime/forward/cpu_forward.h"
#include "runtime/forward/device_forward.h"
#include "runtime/kv/kv_pool.h"
#include "runtime/kv/prefix_cache.h"
#include "runtime/kv/tier_store.h"
#include "runtime/model/model.h"
#include "runtime/model/rope_table.h"
#include "runtime/signals/signals.h"
#include "runtime/step/step_executor.h"

namespace epikv {

class PolicyView;
struct OpenSequence;
struct RunningPass;
struct StepItem;

struct ExecutorOptions {
  int64_t pool_rows = 0;
  int64_t scratch_bytes = 0;  // of the largest forward, and of tiers, in the machine's memory
  DecodeKernel decode_kernel = DecodeKernel::kBatch;
  PrefillKernel prefill_kernel = PrefillKernel::kBatch;
  KvDType kv_dtype = KvDType::kModel;
  // Forwards run in ATen operations alone (DeviceForward), on whatever device the model is on. Not
  // with `deterministic`. False: on the CPU, where the model must be.
  bool device_path = false;
  // Of that device, and of no other executor; null: steps are not recorded.
  std::shared_ptr<GraphRecorder> recorder;
  // And how many of a row's likeliest tokens come to the host to be drawn from. A nucleus is rarely
  // larger; where it is, the row comes.
  int64_t head_tokens = 1024;
  // Forwards of exactly kDeterministicRows rows, so that a row's bits do not depend on the others.
  bool deterministic = false;
  // Prompts are cached for others in blocks of so many tokens; 0: they are not. Where the bits of
  // what follows shall not depend on it, a multiple of what prefill runs in at a time.
  int64_t prefix_block_tokens = 0;
  // Between two places in a prompt where a round may be. What is left there is cached for others
  // where prefix_block_tokens is not 0.
  int64_t prefill_chunk_tokens = 256;
  // Decoded tokens of a sequence between two rounds whose SettleOutcome::attention_mass is
  // measured; its first one is, too. 0: never.
  int64_t mass_interval = 0;
  bool samples = true;  // false: no tokens are drawn, since another rank does (RankedExecutor)
  TierOpener open_tier = TiersIn("");
};

// Runs steps on a Model: builds the packed batch, has it run on the CPU or on a device, commits,
// samples, and lets policies observe and evict. Engine thread.
class Executor final : public StepExecutor {
 public:
  Executor(std::unique_ptr<Model> model, ExecutorOptions options);
  ~Executor() override;

  absl::StatusOr<int64_t> Open(SequenceId id, const Request& request,
                               int64_t prefix_bytes) override;
  absl::StatusOr<std::vector<ForwardOutcome>> Forward(absl::Span<const WorkItem> items) override;
  ForwardOutcome Accept(const WorkItem& item) override;
  // Where several ranks serve the model: of this rank's lanes.
  bool MayRound(const WorkItem& item) const override;
  std::vector<SettleOutcome> Settle(absl::Span<const WorkItem> items) override;
  absl::Status Fork(SequenceId parent, SequenceId child, const Request& request) override;
  CacheFacts Facts(SequenceId id) const override;
  std::shared_ptr<const Packet> Export(SequenceId id,
                                       absl::Span<const int32_t> tokens) const override;
  int64_t PackedBytes(SequenceId id) const override;
  void Close(SequenceId id) override;
  int64_t used_bytes() const override;
  bool lost() const override { return pool_.lost(); }
  int64_t prefix_bytes() const override { return prefixes_.bytes() + evicted_.bytes(); }
  void DropPrefixes() override {
    prefixes_.Clear();
    evicted_.Clear();
  }
  // Which tokens lanes hold that share a keep decision, and where: the same in all ranks, where
  // heads do not decide for themselves.
  uint64_t SharedSlots(SequenceId id) const;
  void AddPool(StepStats& step) const override;
  void AddStageTimes(StepStats& step) const override;

  const KvPool& pool() const { return pool_; }
  // Whether PageIndex::Holds of every open sequence: every kept token can be read. For tests.
  bool PagesHold() const;
  const Model& model() const { return *model_; }
  // Requires: forwards run on the CPU.
  const AttentionCounts& attention_counts() const { return cpu_->attention_counts(); }
  // Null: forwards run on the CPU.
  const DeviceForward* device() const { return device_.get(); }

 private:
  std::vector<StepItem> Prepare(absl::Span<const WorkItem> items);
  StepItem PrepareOne(const WorkItem& work);
  // Runs those again whose first run left doubts, and puts what it gives in their place.
  void LookAgain(absl::Span<StepItem> items);
  bool MassDue(const OpenSequence& sequence, const WorkItem& work) const;
  absl::StatusOr<int64_t> LoadPrefix(OpenSequence& sequence,
                                     absl::Span<const PrefixCache::Block> blocks);
  // Shares what they may hold out among both kinds of cached prefixes.
  void LimitPrefixes(int64_t bytes);
  // A sequence that goes on from what a policy has left of its prompt; null: there is nothing, or
  // it cannot be had, and all is computed.
  std::unique_ptr<OpenSequence> GoOnFromEvicted(SequenceId id, const Request& request,
                                                const EvictedPrefixes::Found& found) const;
  // Keeps what the round has left of a prompt, where it is to be kept.
  void KeepEvicted(OpenSequence& sequence, const WorkItem& item);
  // Caches the tokens of the request's packets. How many.
  absl::StatusOr<int64_t> LoadPackets(OpenSequence& sequence);
  // Tells a policy of prompt tokens that are cached without a forward.
  absl::Status ObserveLoaded(OpenSequence& sequence, int64_t first, int64_t count);
  ForwardOutcome Finish(StepItem& item);
  void KeepPrefix(const StepItem& item);
  StepItem ItemOf(const WorkItem& work);
  SettleOutcome SettleOne(OpenSequence& sequence, const WorkItem& item);
  static void NoteThinking(OpenSequence& sequence, const WorkItem& item);
  static bool ThinkingGoes(const OpenSequence& sequence, const WorkItem& item);
  // Whether the round after this item, with `coming` tokens more than are cached, is to happen.
  static bool RoundIsDue(const OpenSequence& sequence, const WorkItem& item, int64_t coming);
  // The same of all ranks' lanes, once the item's tokens are cached. All ranks ask.
  bool RoundIsDueAnywhere(const OpenSequence& sequence, const WorkItem& item) const;
  // Begins the policy's scratch pass over what is cached of a prompt, and says what runs first;
  // empty: there is no room left in the context.
  absl::StatusOr<std::vector<int32_t>> BeginPass(OpenSequence& sequence, SequenceId id,
                                                 PolicyView& view);
  // What runs next; empty: the rest of a segment, or the pass is over.
  absl::StatusOr<std::vector<int32_t>> GoOnWithPass(OpenSequence& sequence, RunningPass& pass,
                                                    const WorkItem& item);
  SettleOutcome SettlePass(OpenSequence& sequence, const WorkItem& item);
  // The prompt is cached and its round is over.
  void EndPrompt(OpenSequence& sequence);

  const std::unique_ptr<Model> model_;
  const ExecutorOptions options_;
  const ModelShape shape_;
  const std::vector<at::Tensor> output_grams_;  // CacheView::output_gram, [layers]
  std::vector<RopeTable> ropes_;
  const MemorySetAside scratch_;
  KvPool pool_;
  PrefixCache prefixes_;
  EvictedPrefixes evicted_;
  int64_t prefix_limit_ = 0;  // bytes of both
  std::unordered_map<SequenceId, std::unique_ptr<OpenSequence>> open_;
  std::unordered_map<SequenceId, std::unique_ptr<RunningPass>> passes_;

  std::vector<StepItem> ahead_;  // of the last forward
  int64_t next_ahead_ = 0;       // of them, the first that may still be accepted

  StepStats times_;  // of the last step's parts

  // SettleOutcome::attention_mass is measured of at most one sequence a step.
  std::optional<SequenceId> mass_of_;  // in the last forward
  LaneRowsOfStep mass_rows_;           // its newest query's attention, of all lanes

  // One of the two runs all forwards.
  std::unique_ptr<CpuForward> cpu_;
  std::unique_ptr<DeviceForward> device_;
};

}  // namespace epikv
