#include "policies/frozen_policy.h"

#include <cmath>
#include <compare>
#include <deque>
#include <limits>
#include <queue>
#include <utility>

#include "absl/strings/str_cat.h"

namespace epikv {
namespace {

constexpr float kUnscored = -std::numeric_limits<float>::infinity();  // the prompt

// (score, index). Pairs order as victims do: the lowest score first, among equals the older.
using Scored = std::pair<float, int32_t>;
static_assert(sizeof(Scored) == FrozenPolicy::kStateBytesPerToken);

// One of the reserve: the smallest number first, among equals the older.
struct Reserved {
  float measure;
  int32_t index;
  float score;
  auto operator<=>(const Reserved&) const = default;
};
static_assert(sizeof(Reserved) == FrozenPolicy::kStateBytesPerReserved);

// A token of the recent window.
struct Recent {
  float score = 0, measure = 0;
};

template <typename T>
using LowestFirst = std::priority_queue<T, std::vector<T>, std::greater<>>;

struct FrozenState final : PolicyState {
  FrozenState(FrozenPolicy::Scorer score, FrozenPolicy::Reserve reserve)
      : score(std::move(score)), reserve(std::move(reserve)) {}
  std::unique_ptr<PolicyState> Clone() const override {
    return std::make_unique<FrozenState>(*this);
  }

  FrozenPolicy::Scorer score;
  FrozenPolicy::Reserve reserve;
  std::deque<Recent> recent;  // the tokens in the recent window, oldest first
  int64_t first_recent = 0;   // index of the oldest of them
  TokenSpan forgotten;        // of them, these are not cached any more
  // The others that are not protected.
  LowestFirst<Scored> older;
  LowestFirst<Reserved> reserved;  // their largest measures: at most reserve.size
  absl::Status status;
};

int32_t IndexOf(const Scored& scored) { return scored.second; }
int32_t IndexOf(const Reserved& reserved) { return reserved.index; }

template <typename Queue>
void Drop(TokenSpan tokens, Queue& queue) {
  Queue left;
  for (; !queue.empty(); queue.pop()) {
    const int32_t index = IndexOf(queue.top());
    if (index < tokens.begin || index >= tokens.end) left.push(queue.top());
  }
  queue = std::move(left);
}

void Reconsider(FrozenState& state) {
  const Reserved& least = state.reserved.top();
  state.older.emplace(least.score, least.index);
  state.reserved.pop();
}

void Admit(const Recent& token, int32_t index, FrozenState& state) {
  if (std::isnan(token.score) || std::isnan(token.measure)) {
    state.status.Update(absl::InternalError(absl::StrCat("the score of token ", index, " is NaN")));
  } else if (state.reserve.size == 0 || token.score == kUnscored) {
    state.older.emplace(token.score, index);
  } else {
    state.reserved.push({token.measure, index, token.score});
    if (static_cast<int64_t>(state.reserved.size()) > state.reserve.size) Reconsider(state);
  }
}

void LeaveRecent(int64_t newest, const Protection& protection, FrozenState& state) {
  for (; state.first_recent <= newest - protection.recent; ++state.first_recent) {
    const Recent token = state.recent.front();
    state.recent.pop_front();
    const bool forgotten =
        state.first_recent >= state.forgotten.begin && state.first_recent < state.forgotten.end;
    if (forgotten || protection.CoversForever(state.first_recent)) continue;
    Admit(token, static_cast<int32_t>(state.first_recent), state);
  }
}

Eviction PopLowest(int64_t count, FrozenState& state) {
  if (!state.status.ok()) return {.status = state.status};
  const int64_t open = static_cast<int64_t>(state.older.size() + state.reserved.size());
  if (open < count) {
    return {.status = absl::InternalError(
                absl::StrCat(count, " tokens must go but only ", open, " are unprotected"))};
  }
  while (static_cast<int64_t>(state.older.size()) < count) Reconsider(state);
  Eviction eviction{.victims = {{}}};
  for (int64_t i = 0; i < count; ++i) {
    eviction.victims[0].push_back(state.older.top().second);
    state.older.pop();
  }
  return eviction;
}

}  // namespace

std::unique_ptr<PolicyState> FrozenPolicy::NewState(const SequenceInfo&) const {
  return std::make_unique<FrozenState>(fresh_, reserve_);
}

void FrozenPolicy::Forget(PolicyState* state, TokenSpan tokens) const {
  auto& frozen = static_cast<FrozenState&>(*state);
  Drop(tokens, frozen.older);
  Drop(tokens, frozen.reserved);
  frozen.forgotten = tokens;
}

void FrozenPolicy::Observe(absl::Span<SequenceStep> steps) const {
  for (const SequenceStep& step : steps) {
    FrozenState& state = *static_cast<FrozenState*>(step.state);
    if (step.phase == Phase::kPrefill) {
      state.recent.insert(state.recent.end(), step.count, {.score = kUnscored});
    } else {
      state.recent.push_back({.score = state.score(step),
                              .measure = state.reserve.size > 0 ? state.reserve.measure(step) : 0});
    }
    LeaveRecent(step.first + step.count - 1, step.cache.protection(), state);
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
