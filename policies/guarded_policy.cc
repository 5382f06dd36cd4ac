#include "policies/guarded_policy.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "policies/guard.h"
#include "policies/lane.h"
#include "policies/random.h"
#include "policies/scored_policy.h"

namespace epikv {
namespace {

// Of one keep decision.
struct GuardOfTable {
  explicit GuardOfTable(GuardOptions options) : guard(options) {}
  Guard guard;
  uint64_t draws = 0;
  std::vector<int32_t> asked;  // dropped tokens that were asked for since the last round, in order
};

struct GuardedState final : PolicyState {
  std::unique_ptr<PolicyState> inner;
  std::vector<GuardOfTable> tables;

  std::unique_ptr<PolicyState> Clone() const override {
    auto copy = std::make_unique<GuardedState>();
    if (inner != nullptr) copy->inner = inner->Clone();
    copy->tables = tables;
    return copy;
  }
};

// CounterRng's of guards, which rounds have not (RoundStream).
constexpr uint64_t kGuardStreams = uint64_t{1} << 63;

// Tokens of a lane that are cached, and their scores.
struct Candidates {
  std::vector<int32_t> cached;
  std::vector<float> scores;

  std::vector<int32_t> MayGo(const CacheView& cache) const {
    std::vector<int32_t> may_go;
    for (const int32_t token : cached) {
      if (!cache.protection().Covers(token, cache.newest())) may_go.push_back(token);
    }
    return may_go;
  }
  void Remove(int32_t token) {
    const auto at = std::find(cached.begin(), cached.end(), token) - cached.begin();
    cached.erase(cached.begin() + at);
    scores.erase(scores.begin() + at);
  }
};

Candidates CandidatesOf(const CacheView& cache, int64_t layer, int64_t head,
                        const at::Tensor& scores) {
  const absl::Span<const int32_t> index = cache.index(layer, head);
  const float* const first = scores.const_data_ptr<float>();
  return {.cached = {index.begin(), index.end()}, .scores = {first, first + index.size()}};
}

// Guard around a policy's scores, keep decision by keep decision. Its requests are tokens with much
// of a decode query's attention, over what is cached and what lies in the tier: one that was
// dropped comes back at the next round, and is guarded until the phase ends.
class Guarded final : public Policy {
 public:
  Guarded(std::shared_ptr<const ScoredPolicy> inner, Granularity granularity, const GuardRule& rule)
      : inner_(std::move(inner)),
        granularity_(granularity),
        asked_(rule.asked),
        options_{.follow_if_guarded = rule.follow,
                 .relax_times = rule.relax_times,
                 .relax_prob = rule.relax_prob} {}

  std::unique_ptr<PolicyState> NewState(const SequenceInfo& info) const override {
    auto state = std::make_unique<GuardedState>();
    state->inner = inner_->NewState(info);
    return state;
  }

  const Gate* gate() const override { return inner_->gate(); }
  Eviction Draft(const EvictionTask& task) const override {
    return inner_->Draft({.state = InnerOf(task.state), .cache = task.cache});
  }
  std::vector<std::vector<int32_t>> PassSegments(absl::Span<const int32_t> prompt) const override {
    return inner_->PassSegments(prompt);
  }
  void ObservePass(absl::Span<PassStep> steps) const override {
    for (PassStep step : steps) {
      step.state = InnerOf(step.state);
      inner_->ObservePass({&step, 1});
    }
  }

  void Observe(absl::Span<SequenceStep> steps) const override {
    for (SequenceStep& step : steps) {
      auto& state = static_cast<GuardedState&>(*step.state);
      SequenceStep of_inner = step;
      of_inner.state = InnerOf(step.state);
      inner_->Observe({&of_inner, 1});
      state.tables.resize(NumTables(step.cache), GuardOfTable(options_));
      for (int64_t t = 0; t < std::ssize(state.tables); ++t) {
        GuardOfTable& table = state.tables[t];
        for (int64_t i = 0; i < step.count && table.guard.has_old(); ++i) {
          table.guard.Add(static_cast<int32_t>(step.first + i));
        }
        if (step.phase == Phase::kDecode) Ask(step.cache, t, table);
      }
    }
  }

  void Forget(PolicyState* state, TokenSpan tokens) const override {
    inner_->Forget(InnerOf(state), tokens);
    const auto begin = static_cast<int32_t>(tokens.begin), end = static_cast<int32_t>(tokens.end);
    for (GuardOfTable& table : static_cast<GuardedState*>(state)->tables) {
      table.guard.Forget(begin, end);
      std::erase_if(table.asked, [=](int32_t token) { return token >= begin && token < end; });
    }
  }

  std::vector<Eviction> Evict(absl::Span<EvictionTask> tasks) const override {
    std::vector<Eviction> evictions;
    evictions.reserve(tasks.size());
    for (const EvictionTask& task : tasks) evictions.push_back(EvictOne(task));
    return evictions;
  }

 private:
  static PolicyState* InnerOf(PolicyState* state) {
    return static_cast<GuardedState*>(state)->inner.get();
  }
  int64_t NumTables(const CacheView& cache) const {
    if (granularity_ == Granularity::kToken) return 1;
    return cache.num_layers() * (granularity_ == Granularity::kHead ? cache.num_kv_heads() : 1);
  }
  // The first lane of a table, and how many follow one another.
  int64_t LanesPerTable(const CacheView& cache) const {
    return cache.num_layers() * cache.num_kv_heads() / NumTables(cache);
  }

  // What the newest query gives the tokens of a lane, and behind them those that it has dropped:
  // the mean over the group. fp32 [used + ghosts]
  static at::Tensor Attention(CacheView& cache, int64_t layer, int64_t head,
                              absl::Span<const int32_t> ghosts) {
    const int64_t group = cache.num_heads() / cache.num_kv_heads();
    const at::Tensor queries = cache.queries(layer);
    const at::Tensor q = queries[queries.size(0) - 1].narrow(0, head * group, group).to(at::kFloat);
    const at::Tensor keys =
        at::cat({cache.keys(layer, head).to(at::kFloat), cache.ghost_keys(layer, head, ghosts)});
    const AttentionFacts facts = cache.attention(layer);
    at::Tensor logits = at::matmul(q, keys.t()).mul_(facts.scale);  // [group, n]
    SoftCap(logits, facts);
    if (facts.window.has_value()) {
      std::vector<int64_t> hidden;
      const auto hide = [&](absl::Span<const int32_t> tokens, int64_t first) {
        for (int64_t i = 0; i < std::ssize(tokens); ++i) {
          if (tokens[i] <= cache.newest() - *facts.window) hidden.push_back(first + i);
        }
      };
      const absl::Span<const int32_t> index = cache.index(layer, head);
      hide(index, 0);
      hide(ghosts, std::ssize(index));
      logits.index_fill_(1, at::tensor(hidden, at::kLong), -std::numeric_limits<float>::infinity());
    }
    return SoftmaxOfSeen(logits).mean(0);
  }

  // Tells a table's guard what the newest query asks for.
  void Ask(CacheView& cache, int64_t t, GuardOfTable& table) const {
    const int64_t lanes = LanesPerTable(cache), heads = cache.num_kv_heads();
    const int64_t first = t * lanes;
    const absl::Span<const int32_t> index = cache.index(first / heads, first % heads);
    const std::vector<int32_t> ghosts = cache.ghosts(first / heads, first % heads);
    if (ghosts.empty() && !table.guard.has_old()) return;  // nobody could be told
    at::Tensor mass = at::zeros({std::ssize(index) + std::ssize(ghosts)});
    for (int64_t lane = first; lane < first + lanes; ++lane) {
      mass += Attention(cache, lane / heads, lane % heads, ghosts);
    }
    const int64_t most = std::min(asked_, mass.numel());
    const at::Tensor top = std::get<1>(mass.topk(most));  // the most first
    for (int64_t i = 0; i < most; ++i) {
      const int64_t place = top[i].item<int64_t>();
      if (place < std::ssize(index)) {
        table.guard.Hit(index[place]);
        continue;
      }
      const int32_t ghost = ghosts[place - std::ssize(index)];
      if (std::find(table.asked.begin(), table.asked.end(), ghost) == table.asked.end()) {
        table.asked.push_back(ghost);
      }
    }
  }

  Eviction EvictOne(const EvictionTask& task) const {
    auto& state = static_cast<GuardedState&>(*task.state);
    CacheView& cache = task.cache;
    const std::vector<at::Tensor> scores =
        inner_->ScoreAll({.state = state.inner.get(), .cache = cache});
    Eviction eviction;
    eviction.victims.resize(scores.size());
    eviction.recalled.resize(scores.size());
    for (size_t t = 0; t < scores.size() && eviction.status.ok(); ++t) {
      if (!scores[t].defined()) continue;
      eviction.status = EvictOf(cache, static_cast<int64_t>(t), scores[t], state.tables[t],
                                eviction.victims[t], eviction.recalled[t]);
    }
    return eviction;
  }

  // The new tokens of a lane make room first, then those that come back: by the scores of what is
  // not guarded, or by chance.
  absl::Status EvictOf(const CacheView& cache, int64_t t, const at::Tensor& scores,
                       GuardOfTable& table, std::vector<int32_t>& victims,
                       std::vector<int32_t>& recalled) const {
    const int64_t lane = t * LanesPerTable(cache), heads = cache.num_kv_heads();
    const CounterRng random(cache.seed(), kGuardStreams + static_cast<uint64_t>(t));
    const Guard::Draw draw = [&] { return random.Uniform(table.draws++); };
    Candidates left = CandidatesOf(cache, lane / heads, lane % heads, scores);
    Guard& guard = table.guard;
    guard.BeginIfOver(left.cached, left.MayGo(cache));

    const std::vector<int32_t> ghosts = cache.ghosts(lane / heads, lane % heads);
    int64_t by_score = cache.excess(lane / heads, lane % heads), by_chance = 0;
    const int64_t room = std::ssize(left.MayGo(cache)) - by_score;  // for who comes back
    std::vector<int32_t> unguarded;
    for (const int32_t token : table.asked) {
      if (std::ssize(recalled) >= room) break;
      if (std::find(ghosts.begin(), ghosts.end(), token) == ghosts.end()) continue;  // forgotten
      const bool guards = guard.Guards(token, draw);
      ++(guards && !options_.follow_if_guarded ? by_chance : by_score);
      if (!guards) unguarded.push_back(token);
      recalled.push_back(token);
    }
    table.asked.clear();
    while (by_score > 0) {
      // Once all that is not guarded has gone, none is old: the next phase begins.
      guard.BeginIfOver(left.cached, left.MayGo(cache));
      const absl::StatusOr<int64_t> dropped = DropByScore(cache, by_score, guard, left, victims);
      if (!dropped.ok()) return dropped.status();
      by_score -= *dropped;
    }
    for (; by_chance > 0; --by_chance) {
      guard.BeginIfOver(left.cached, left.MayGo(cache));
      victims.push_back(guard.Chance(draw));
      guard.Drop(victims.back());
      left.Remove(victims.back());
    }
    for (const int32_t token : unguarded) guard.Add(token);
    return absl::OkStatus();
  }

  // Drops as many as there are that are not guarded, the lowest, `count` at most: how many.
  static absl::StatusOr<int64_t> DropByScore(const CacheView& cache, int64_t count, Guard& guard,
                                             Candidates& left, std::vector<int32_t>& victims) {
    std::vector<int32_t> open = guard.unguarded();
    std::sort(open.begin(), open.end());
    Candidates of_open;
    for (size_t i = 0; i < left.cached.size(); ++i) {
      if (!std::binary_search(open.begin(), open.end(), left.cached[i])) continue;
      of_open.cached.push_back(left.cached[i]);
      of_open.scores.push_back(left.scores[i]);
    }
    const int64_t may_go = std::ssize(of_open.MayGo(cache));
    if (may_go == 0) return absl::InternalError("a guard leaves nothing to drop");
    absl::StatusOr<std::vector<int32_t>> lowest =
        LowestScores(of_open.scores, of_open.cached, cache.protection(), cache.newest(),
                     std::min(count, may_go));
    if (!lowest.ok()) return lowest.status();
    for (const int32_t victim : *lowest) {
      guard.Drop(victim);
      left.Remove(victim);
      victims.push_back(victim);
    }
    return std::ssize(*lowest);
  }

  const std::shared_ptr<const ScoredPolicy> inner_;
  const Granularity granularity_;
  const int64_t asked_;
  const GuardOptions options_;
};

}  // namespace

std::shared_ptr<const Policy> GuardedPolicy(std::shared_ptr<const Policy> inner,
                                            Granularity granularity, const GuardRule& rule) {
  auto scored = std::dynamic_pointer_cast<const ScoredPolicy>(std::move(inner));
  if (scored == nullptr) throw std::invalid_argument("a guard is around a policy that scores");
  return std::make_shared<Guarded>(std::move(scored), granularity, rule);
}

}  // namespace epikv
