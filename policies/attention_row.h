#pragma once

#include <vector>

#include "absl/types/span.h"
#include "policies/cache_view.h"
#include "policies/signals.h"

namespace epikv {

// What a step's queries gave each token, averaged over heads and over the layers from `first_layer`
// on. Of a policy whose lanes share one slot order. [used], by slot
inline std::vector<float> MeanAttention(const Signals::AttentionRow& attention,
                                        const CacheView& cache, int64_t first_layer = 0) {
  std::vector<float> mean(cache.index(0, 0).size());
  for (int64_t layer = first_layer; layer < cache.num_layers(); ++layer) {
    for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
      const absl::Span<const float> row = attention.at(layer, head);
      for (size_t slot = 0; slot < mean.size(); ++slot) mean[slot] += row[slot];
    }
  }
  const float lanes = (cache.num_layers() - first_layer) * cache.num_kv_heads();
  for (float& mass : mean) mass /= lanes;
  cache.AverageOverRanks(absl::MakeSpan(mean));
  return mean;
}

}  // namespace epikv
