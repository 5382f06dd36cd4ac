#include "policies/scored_policy.h"

#include <utility>

#include "policies/select.h"

namespace epikv {

std::vector<Eviction> ScoredPolicy::Evict(absl::Span<EvictionTask> tasks) const {
  std::vector<Eviction> evictions;
  evictions.reserve(tasks.size());
  for (const EvictionTask& task : tasks) evictions.push_back(EvictOne(task));
  return evictions;
}

Eviction ScoredPolicy::EvictOne(const EvictionTask& task) const {
  const CacheView& cache = task.cache;
  const int64_t layers = granularity_ == Granularity::kToken ? 1 : cache.num_layers();
  const int64_t heads = granularity_ == Granularity::kHead ? cache.num_kv_heads() : 1;
  Eviction eviction;
  eviction.victims.resize(layers * heads);
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t excess = cache.excess(layer, head);
      if (excess == 0) continue;
      absl::StatusOr<std::vector<int32_t>> lowest =
          LowestScores(Score(task, layer, head), cache.index(layer, head), cache.protection(),
                       cache.newest(), excess);
      if (!lowest.ok()) return {.status = lowest.status()};
      eviction.victims[layer * heads + head] = *std::move(lowest);
    }
  }
  return eviction;
}

}  // namespace epikv
