#include "policies/frozen_policy.h"

#include <cmath>
#include <deque>
#include <limits>
#include <queue>
#include <utility>

#include "absl/strings/str_cat.h"

namespace epikv {
namespace {

// (score, index). Pairs order as victims do: the lowest score first, among equals the older.
using Scored = std::pair<float, int32_t>;
static_assert(sizeof(Scored) == FrozenPolicy::kStateBytesPerToken);

struct FrozenState final : PolicyState {
  FrozenState(FrozenPolicy::Scorer score, Protection protection)
      : score(std::move(score)), protection(std::move(protection)) {}
  std::unique_ptr<PolicyState> Clone() const override {
    return std::make_unique<FrozenState>(*this);
  }

  FrozenPolicy::Scorer score;
  const Protection protection;
  std::deque<float> recent;  // scores of the tokens in the recent window, oldest first
  int64_t first_recent = 0;  // index of the oldest of them
  std::priority_queue<Scored, std::vector<Scored>, std::greater<>> older;  // without protected ones
  absl::Status status;
};

void LeaveRecent(int64_t newest, FrozenState& state) {
  for (; state.first_recent <= newest - state.protection.recent; ++state.first_recent) {
    const float score = state.recent.front();
    state.recent.pop_front();
    if (state.protection.CoversForever(state.first_recent)) continue;
    if (std::isnan(score)) {
      state.status.Update(
          absl::InternalError(absl::StrCat("the score of token ", state.first_recent, " is NaN")));
      continue;
    }
    state.older.emplace(score, static_cast<int32_t>(state.first_recent));
  }
}

Eviction PopLowest(int64_t count, FrozenState& state) {
  if (!state.status.ok()) return {.status = state.status};
  if (static_cast<int64_t>(state.older.size()) < count) {
    return {.status = absl::InternalError(absl::StrCat(count, " tokens must go but only ",
                                                       state.older.size(), " are unprotected"))};
  }
  Eviction eviction{.victims = {{}}};
  for (int64_t i = 0; i < count; ++i) {
    eviction.victims[0].push_back(state.older.top().second);
    state.older.pop();
  }
  return eviction;
}

}  // namespace

std::unique_ptr<PolicyState> FrozenPolicy::NewState(const SequenceInfo& info) const {
  return std::make_unique<FrozenState>(fresh_, info.protection);
}

void FrozenPolicy::Observe(absl::Span<SequenceStep> steps) const {
  for (const SequenceStep& step : steps) {
    FrozenState& state = *static_cast<FrozenState*>(step.state);
    if (step.phase == Phase::kPrefill) {
      state.recent.insert(state.recent.end(), step.count, -std::numeric_limits<float>::infinity());
    } else {
      state.recent.push_back(state.score(step));
    }
    LeaveRecent(step.first + step.count - 1, state);
  }
}

std::vector<Eviction> FrozenPolicy::Evict(absl::Span<EvictionTask> tasks) const {
  std::vector<Eviction> evictions;
  evictions.reserve(tasks.size());
  for (const EvictionTask& task : tasks) {
    evictions.push_back(PopLowest(task.cache.excess(0, 0), *static_cast<FrozenState*>(task.state)));
  }
  return evictions;
}

}  // namespace epikv
