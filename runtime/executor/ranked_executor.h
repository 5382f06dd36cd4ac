#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "policies/spec.h"
#include "runtime/executor/executor.h"
#include "runtime/ranks/ranks.h"
#include "runtime/step/step_executor.h"

namespace epikv {

// Rank 0 of a model that several ranks serve: tells the others each call, and runs it on its own
// shard as they do on theirs. What it says of a cache is what its own shard holds; each of the
// others holds as much. A rank that fails, or comes to another result, ends them all: from then on
// every call fails with the reason.
class RankedExecutor final : public StepExecutor {
 public:
  // ranks: this one's, of rank 0.
  RankedExecutor(std::unique_ptr<Executor> own, std::shared_ptr<Ranks> ranks);
  // The others' ServeRank returns.
  ~RankedExecutor() override;

  absl::StatusOr<int64_t> Open(SequenceId id, const Request& request,
                               int64_t prefix_bytes) override;
  absl::StatusOr<std::vector<ForwardOutcome>> Forward(absl::Span<const WorkItem> items) override;
  ForwardOutcome Accept(const WorkItem& item) override;
  bool MayRound(const WorkItem& item) const override;
  std::vector<SettleOutcome> Settle(absl::Span<const WorkItem> items) override;
  absl::Status Fork(SequenceId parent, SequenceId child, const Request& request) override;
  CacheFacts Facts(SequenceId id) const override { return own_->Facts(id); }
  int64_t PackedBytes(SequenceId id) const override { return own_->PackedBytes(id); }
  void Close(SequenceId id) override;
  int64_t used_bytes() const override { return own_->used_bytes(); }
  bool lost() const override { return own_->lost(); }
  int64_t prefix_bytes() const override { return own_->prefix_bytes(); }
  void DropPrefixes() override;
  void AddPool(StepStats& step) const override { own_->AddPool(step); }
  void AddStageTimes(StepStats& step) const override { own_->AddStageTimes(step); }

 private:
  const std::unique_ptr<Executor> own_;
  const std::shared_ptr<Ranks> ranks_;
};

// The life of another rank: runs rank 0's calls on its own shard, until rank 0 has no more. Not OK:
// a rank has failed. catalog: as rank 0's.
absl::Status ServeRank(Executor& own, Ranks& ranks, PolicyCatalog catalog, const ModelShape& shape);

}  // namespace epikv
