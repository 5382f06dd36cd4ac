#include "policies/scored_policy.h"

#include <ATen/ATen.h>

#include <utility>

#include "policies/recipe.h"
#include "policies/select.h"

namespace epikv {
namespace {

absl::Span<const float> SpanOf(const at::Tensor& scores) {
  return {scores.const_data_ptr<float>(), static_cast<size_t>(scores.numel())};
}

}  // namespace

Recipe Recipe::Of(const Params& params, Granularity granularity, int64_t own_columns) {
  Recipe recipe{.granularity = granularity};
  PolicyTraits traits;
  AddRecipe(params, traits);
  recipe.pool = traits.pool;
  if (params.Has("floor")) recipe.floor = params.Float("floor");
  if (params.Has("decorate")) {
    for (const std::string& name : params.ChoiceList("decorate")) {
      const DecoratorSpec& spec = *FindDecorator(name);
      recipe.decorators.push_back(spec.make(own_columns));
      own_columns += std::ssize(spec.columns);
    }
  }
  if (params.Has("select")) {
    recipe.sample = params.Choice("select") == "sample";
    if (params.Choice("select") == "threshold") {
      recipe.threshold = static_cast<float>(params.Float("threshold"));
    }
  }
  return recipe;
}

at::Tensor Scores(const std::vector<float>& by_slot) {
  return at::tensor(at::ArrayRef<float>(by_slot), at::kFloat);
}

std::vector<Eviction> ScoredPolicy::Evict(absl::Span<EvictionTask> tasks) const {
  std::vector<Eviction> evictions;
  evictions.reserve(tasks.size());
  for (const EvictionTask& task : tasks) evictions.push_back(EvictOne(task));
  return evictions;
}

std::vector<at::Tensor> ScoredPolicy::ScoreAll(const EvictionTask& task) const {
  const CacheView& cache = task.cache;
  const int64_t layers = recipe_.granularity == Granularity::kToken ? 1 : cache.num_layers();
  const int64_t heads = recipe_.granularity == Granularity::kHead ? cache.num_kv_heads() : 1;
  std::vector<at::Tensor> scores(layers * heads);
  for (int64_t i = 0; i < layers * heads; ++i) {
    if (recipe_.all_lanes || cache.excess(i / heads, i % heads) > 0) {
      scores[i] = ScoreLane(task, i / heads, i % heads);
    }
  }
  Reconcile(task, scores);
  return scores;
}

Eviction ScoredPolicy::EvictOne(const EvictionTask& task) const {
  const CacheView& cache = task.cache;
  const std::vector<at::Tensor> scores = ScoreAll(task);
  const int64_t heads = recipe_.granularity == Granularity::kHead ? cache.num_kv_heads() : 1;
  const int64_t lanes = std::ssize(scores);
  const int64_t per_pool = recipe_.pool == Pool::kLane    ? 1
                           : recipe_.pool == Pool::kLayer ? heads
                                                          : lanes;
  Eviction eviction;
  eviction.victims.resize(lanes);
  for (int64_t first = 0; first < lanes; first += per_pool) {
    if (!scores[first].defined()) continue;
    eviction.status = Select(cache, first, absl::MakeConstSpan(scores).subspan(first, per_pool),
                             absl::MakeSpan(eviction.victims).subspan(first, per_pool));
    if (!eviction.status.ok()) return eviction;
  }
  return eviction;
}

at::Tensor ScoredPolicy::ScoreLane(const EvictionTask& task, int64_t layer, int64_t head) const {
  Lane lane(task.cache, layer, head);
  at::Tensor score = Score(task, lane);
  for (const auto& decorator : recipe_.decorators) score = decorator->Apply(score, lane);
  return score.to(at::kCPU, at::kFloat).contiguous();
}

absl::Status ScoredPolicy::Select(const CacheView& cache, int64_t first_lane,
                                  absl::Span<const at::Tensor> pool,
                                  absl::Span<std::vector<int32_t>> victims) const {
  const int64_t heads = recipe_.granularity == Granularity::kHead ? cache.num_kv_heads() : 1;
  const int64_t count = cache.excess(first_lane / heads, first_lane % heads);
  std::vector<ScoredLane> lanes;
  std::vector<std::vector<float>> drawn(pool.size());
  for (size_t i = 0; i < pool.size(); ++i) {
    const int64_t lane = first_lane + static_cast<int64_t>(i);
    lanes.push_back({SpanOf(pool[i]), cache.index(lane / heads, lane % heads)});
    if (!recipe_.sample) continue;
    drawn[i] = DrawnScores(lanes[i].scores, lanes[i].index, cache.seed(),
                           RoundStream(cache, lane / heads, lane % heads));
    lanes[i].scores = drawn[i];
  }
  if (recipe_.pool == Pool::kLane) {
    absl::StatusOr<std::vector<int32_t>> lowest =
        LowestScores(lanes[0].scores, lanes[0].index, cache.protection(), cache.newest(), count,
                     recipe_.threshold);
    if (!lowest.ok()) return lowest.status();
    victims[0] = *std::move(lowest);
    return absl::OkStatus();
  }
  int64_t held = 0;
  for (const ScoredLane& lane : lanes) held += static_cast<int64_t>(lane.index.size());
  const double budget = static_cast<double>(held - count) / static_cast<double>(lanes.size());
  absl::StatusOr<std::vector<std::vector<int32_t>>> lowest =
      LowestScoresOfPool(lanes, cache.protection(), cache.newest(), count,
                         static_cast<int64_t>(recipe_.floor * budget), recipe_.threshold);
  if (!lowest.ok()) return lowest.status();
  std::move(lowest->begin(), lowest->end(), victims.begin());
  return absl::OkStatus();
}

}  // namespace epikv
