#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "policies/gate.h"
#include "policies/scored_policy.h"

namespace epikv {

// A scored policy that ranks tokens by what a gate says of them at their birth. Every lane keeps
// tokens of its own; the first columns have the gate's numbers.
class GatedPolicy : public ScoredPolicy {
 public:
  const Gate* gate() const final { return gate_.get(); }
  void Observe(absl::Span<SequenceStep> steps) const final;

 protected:
  static constexpr int64_t kSaid = 0;  // the first column of Gate::numbers

  // delay: a token's number is what the gate says of the token so many after it; 0 until then.
  GatedPolicy(Recipe recipe, std::shared_ptr<const Gate> gate, int64_t delay = 0)
      : ScoredPolicy(std::move(recipe)), gate_(std::move(gate)), delay_(delay) {}

 private:
  const std::shared_ptr<const Gate> gate_;
  const int64_t delay_;
};

}  // namespace epikv
