#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "policies/ages.h"
#include "policies/policy.h"

namespace epikv {

// A policy that says at a decode token's birth what the token will be worth at several ages, and
// drops those of the unprotected ones that are worth least at the age they have. O(cached tokens) a
// round. The prompt is never scored: what of it is unprotected goes first.
class AgedPolicy final : public Policy {
 public:
  // What a sequence's next decode token is worth at each age. [ages]
  using Scorer = std::function<void(const SequenceStep& step, absl::Span<float> worth)>;

  AgedPolicy(Ages ages, Scorer scorer);

  std::unique_ptr<PolicyState> NewState(const SequenceInfo& info) const override;
  void Observe(absl::Span<SequenceStep> steps) const override;
  void Forget(PolicyState* state, TokenSpan tokens) const override;
  std::vector<Eviction> Evict(absl::Span<EvictionTask> tasks) const override;

  // Of the state: for PolicyTraits.
  static int64_t StateBytesPerToken(int64_t ages) { return 4 * (ages + 1); }

 private:
  struct State;
  Eviction EvictOne(const EvictionTask& task) const;

  const Ages ages_;
  const Scorer scorer_;
};

}  // namespace epikv
