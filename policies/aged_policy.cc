#include "policies/aged_policy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace epikv {

// The tokens that are cached and may be dropped some time, oldest first.
struct AgedPolicy::State final : public PolicyState {
  std::unique_ptr<PolicyState> Clone() const override { return std::make_unique<State>(*this); }

  // Keeps those for which `stays` says so.
  template <class Stays>
  void Filter(int64_t ages, Stays stays) {
    size_t left = 0;
    for (size_t i = 0; i < index.size(); ++i) {
      if (!stays(i)) continue;
      if (left != i) {
        index[left] = index[i];
        std::copy_n(worth.begin() + i * ages, ages, worth.begin() + left * ages);
      }
      ++left;
    }
    index.resize(left);
    worth.resize(left * ages);
  }

  std::vector<int32_t> index;
  std::vector<float> worth;  // [tokens][ages]
  absl::Status status;
};

AgedPolicy::AgedPolicy(Ages ages, Scorer scorer)
    : ages_(std::move(ages)), scorer_(std::move(scorer)) {}

std::unique_ptr<PolicyState> AgedPolicy::NewState(const SequenceInfo&) const {
  return std::make_unique<State>();
}

void AgedPolicy::Observe(absl::Span<SequenceStep> steps) const {
  constexpr float kUnscored = -std::numeric_limits<float>::infinity();
  for (const SequenceStep& step : steps) {
    State& state = *static_cast<State*>(step.state);
    const Protection& protection = step.cache.protection();
    for (int64_t i = step.first; i < step.first + step.count; ++i) {
      if (protection.CoversForever(i)) continue;
      state.index.push_back(static_cast<int32_t>(i));
      state.worth.resize(state.index.size() * ages_.count(), kUnscored);
    }
    if (step.phase == Phase::kPrefill || protection.CoversForever(step.first)) continue;
    const absl::Span<float> worth = absl::MakeSpan(state.worth).last(ages_.count());
    scorer_(step, worth);
    if (!std::all_of(worth.begin(), worth.end(), [](float x) { return std::isfinite(x); })) {
      state.status.Update(
          absl::InternalError(absl::StrCat("a score of token ", step.first, " is not finite")));
    }
  }
}

void AgedPolicy::Forget(PolicyState* state, TokenSpan tokens) const {
  auto& aged = static_cast<State&>(*state);
  aged.Filter(ages_.count(), [&](size_t i) {
    return aged.index[i] < tokens.begin || aged.index[i] >= tokens.end;
  });
}

Eviction AgedPolicy::EvictOne(const EvictionTask& task) const {
  State& state = *static_cast<State*>(task.state);
  if (!state.status.ok()) return {.status = state.status};
  const auto excess = static_cast<size_t>(task.cache.excess(0, 0));
  const int64_t newest = task.cache.newest();
  std::vector<std::pair<float, int32_t>> open;  // among equals the older goes
  for (size_t i = 0; i < state.index.size(); ++i) {
    const int64_t age = newest - state.index[i];
    if (age < task.cache.protection().recent) break;
    const float* const worth = state.worth.data() + i * ages_.count();
    open.emplace_back(ages_.At(age, [worth](int64_t at) { return worth[at]; }), state.index[i]);
  }
  if (open.size() < excess) {
    return {.status = absl::InternalError(absl::StrCat(excess, " tokens must go but only ",
                                                       open.size(), " are unprotected"))};
  }
  std::nth_element(open.begin(), open.begin() + excess, open.end());
  Eviction eviction{.victims = {{}}};
  for (size_t i = 0; i < excess; ++i) eviction.victims[0].push_back(open[i].second);
  std::vector<int32_t> gone = eviction.victims[0];
  std::sort(gone.begin(), gone.end());
  state.Filter(ages_.count(), [&](size_t i) {
    return !std::binary_search(gone.begin(), gone.end(), state.index[i]);
  });
  return eviction;
}

std::vector<Eviction> AgedPolicy::Evict(absl::Span<EvictionTask> tasks) const {
  std::vector<Eviction> evictions;
  evictions.reserve(tasks.size());
  for (const EvictionTask& task : tasks) evictions.push_back(EvictOne(task));
  return evictions;
}

}  // namespace epikv
