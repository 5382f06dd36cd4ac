#pragma once

#include <cstdint>
#include <vector>

#include "policies/policy.h"

namespace epikv {

// A policy that gives every token of a lane a number and drops the lowest ones, lane by lane.
// Protection, ties ("newer wins") and NaN are select.h's.
class ScoredPolicy : public Policy {
 public:
  std::vector<Eviction> Evict(absl::Span<EvictionTask> tasks) const final;

 protected:
  explicit ScoredPolicy(Granularity granularity) : granularity_(granularity) {}

 private:
  // What each token of the lane is worth, by slot. [used]. Asked only of lanes over their budget.
  virtual std::vector<float> Score(const EvictionTask& task, int64_t layer, int64_t head) const = 0;

  Eviction EvictOne(const EvictionTask& task) const;

  const Granularity granularity_;
};

}  // namespace epikv
