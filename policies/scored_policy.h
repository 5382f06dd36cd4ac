#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "policies/decorator.h"
#include "policies/lane.h"
#include "policies/policy.h"
#include "policies/select.h"

namespace epikv {

// The parts of a scored policy around its scorer.
struct Recipe {
  Granularity granularity = Granularity::kToken;
  Pool pool = Pool::kLane;
  double floor = 0;  // with a pool: the share of the budget every lane keeps for its own best
  std::vector<std::shared_ptr<const Decorator>> decorators;
  bool sample = false;             // victims by chance, instead of the lowest scores
  float threshold = kNoThreshold;  // what is below goes too, budget or not
  bool all_lanes =
      false;  // those within their budgets are ranked as well: PolicyTraits::rounds_every

  // Of the parameters that recipe.h defines, where the policy takes them. own_columns: of the
  // policy itself; its decorators' come after them.
  static Recipe Of(const Params& params, Granularity granularity, int64_t own_columns = 0);
};

// A policy that gives every token of a lane a number and drops the lowest ones, lane by lane:
// scorer -> decorators -> Reconcile -> allocator -> protector -> selector. Protection, ties ("newer
// wins") and NaN are select.h's.
class ScoredPolicy : public Policy {
 public:
  std::vector<Eviction> Evict(absl::Span<EvictionTask> tasks) const final;

  // Scores of a round: of the lanes that share a keep decision, in order, decorated and reconciled.
  // fp32, by slot, valid until the next step; undefined for lanes within their budget. Seen by
  // tests.
  std::vector<at::Tensor> ScoreAll(const EvictionTask& task) const;

 protected:
  explicit ScoredPolicy(Recipe recipe) : recipe_(std::move(recipe)) {}
  explicit ScoredPolicy(Granularity granularity) : recipe_{.granularity = granularity} {}

 private:
  // What each token of the lane is worth: fp32, by slot, [n]. `lane` is the first of those that
  // share a keep decision. Asked only where a budget is exceeded.
  virtual at::Tensor Score(const EvictionTask& task, Lane& lane) const = 0;

  // A last look at all scores of a round together, to make lanes comparable. scores: of the lanes
  // that share a keep decision, in order; undefined where none were asked for.
  virtual void Reconcile(const EvictionTask& task, std::vector<at::Tensor>& scores) const {}

  Eviction EvictOne(const EvictionTask& task) const;
  at::Tensor ScoreLane(const EvictionTask& task, int64_t layer, int64_t head) const;
  absl::Status Select(const CacheView& cache, int64_t first_lane, absl::Span<const at::Tensor> pool,
                      absl::Span<std::vector<int32_t>> victims) const;

  const Recipe recipe_;
};

// A tensor of scores from plain ones.
at::Tensor Scores(const std::vector<float>& by_slot);

}  // namespace epikv
