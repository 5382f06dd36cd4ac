#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "policies/policy.h"

namespace epikv {

// A policy that says at a decode token's birth what the token will be worth at several ages, and
// drops those of the unprotected ones that are worth least at the age they have: between two ages
// by the logarithm of the age, beyond the first and the last what it is there. O(cached tokens) a
// round. The prompt is never scored: what of it is unprotected goes first.
class AgedPolicy final : public Policy {
 public:
  // What a sequence's next decode token is worth at each age. [ages]
  using Scorer = std::function<void(const SequenceStep& step, absl::Span<float> worth)>;

  // ages: in tokens, ascending, 1 or more each; not empty.
  AgedPolicy(absl::Span<const int64_t> ages, Scorer scorer);

  std::unique_ptr<PolicyState> NewState(const SequenceInfo& info) const override;
  void Observe(absl::Span<SequenceStep> steps) const override;
  void Forget(PolicyState* state, TokenSpan tokens) const override;
  std::vector<Eviction> Evict(absl::Span<EvictionTask> tasks) const override;

  // Of the state: for PolicyTraits.
  static int64_t StateBytesPerToken(int64_t ages) { return 4 * (ages + 1); }

 private:
  struct State;
  Eviction EvictOne(const EvictionTask& task) const;
  float WorthAt(int64_t age, absl::Span<const float> worth) const;

  // Of an age below the last: the last of the ages that is not above it, and how far it is towards
  // the next.
  struct Place {
    int64_t at = 0;
    float beyond = 0;
  };
  const int64_t num_ages_;
  std::vector<Place> places_;  // [the last age]
  const Scorer scorer_;
};

}  // namespace epikv
