#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "policies/policy.h"

namespace epikv {

// A policy that gives every decode token one score at birth and drops the lowest ones of those that
// are not protected. Since scores never change and the recent window only moves forward, that is a
// heap: a token enters it when it leaves the recent window, the lowest leave the cache. O(log
// budget) a token. The prompt is never scored: what of it is unprotected goes first.
class FrozenPolicy final : public Policy {
 public:
  // The score of a sequence's next decode token. A scorer remembers what it has seen of its
  // sequence; a copy goes on alone.
  using Scorer = std::function<float(const SequenceStep& step)>;

  // Of those that are not protected and have a score, the `size` tokens with the largest numbers
  // from `measure` stay whatever their scores: all but as many as a round must drop, where that is
  // fewer. Among equals the newer.
  struct Reserve {
    int64_t size = 0;
    Scorer measure;
  };

  // fresh: of a sequence that has decoded nothing.
  explicit FrozenPolicy(Scorer fresh) : fresh_(std::move(fresh)) {}
  FrozenPolicy(Scorer fresh, Reserve reserve)
      : fresh_(std::move(fresh)), reserve_(std::move(reserve)) {}

  std::unique_ptr<PolicyState> NewState(const SequenceInfo& info) const override;
  void Observe(absl::Span<SequenceStep> steps) const override;
  void Forget(PolicyState* state, TokenSpan tokens) const override;
  std::vector<Eviction> Evict(absl::Span<EvictionTask> tasks) const override;

  // Of the state: for PolicyTraits.
  static constexpr int64_t kStateBytesPerToken = 8, kStateBytesPerReserved = 12;

 private:
  const Scorer fresh_;
  const Reserve reserve_;
};

}  // namespace epikv
