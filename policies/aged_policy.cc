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

AgedPolicy::AgedPolicy(absl::Span<const int64_t> ages, Scorer scorer)
    : num_ages_(std::ssize(ages)), scorer_(std::move(scorer)) {
  const auto log_of = [](int64_t age) { return std::log2(static_cast<double>(age)); };
  int64_t at = 0;
  for (int64_t age = 0; age < ages.back(); ++age) {
    while (at + 1 < num_ages_ && ages[at + 1] <= age) ++at;
    const bool between = age > ages[at];
    const double beyond =
        between ? (log_of(age) - log_of(ages[at])) / (log_of(ages[at + 1]) - log_of(ages[at])) : 0;
    places_.push_back({.at = at, .beyond = static_cast<float>(beyond)});
  }
}

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
      state.worth.resize(state.index.size() * num_ages_, kUnscored);
    }
    if (step.phase == Phase::kPrefill || protection.CoversForever(step.first)) continue;
    const absl::Span<float> worth = absl::MakeSpan(state.worth).last(num_ages_);
    scorer_(step, worth);
    if (!std::all_of(worth.begin(), worth.end(), [](float x) { return std::isfinite(x); })) {
      state.status.Update(
          absl::InternalError(absl::StrCat("a score of token ", step.first, " is not finite")));
    }
  }
}

void AgedPolicy::Forget(PolicyState* state, TokenSpan tokens) const {
  auto& aged = static_cast<State&>(*state);
  aged.Filter(num_ages_, [&](size_t i) {
    return aged.index[i] < tokens.begin || aged.index[i] >= tokens.end;
  });
}

float AgedPolicy::WorthAt(int64_t age, absl::Span<const float> worth) const {
  if (age >= std::ssize(places_)) return worth.back();
  const Place& place = places_[age];
  const float at = worth[place.at];
  return place.beyond == 0 ? at : (1 - place.beyond) * at + place.beyond * worth[place.at + 1];
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
    const float worth =
        WorthAt(age, absl::MakeConstSpan(state.worth).subspan(i * num_ages_, num_ages_));
    open.emplace_back(worth, state.index[i]);
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
  state.Filter(num_ages_, [&](size_t i) {
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
