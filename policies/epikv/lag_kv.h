#pragma once

#include <ATen/ATen.h>

#include <cmath>
#include <memory>

#include "policies/scored_policy.h"

// epikv_lag_kv and epikv_lag_kv_key: the deviation over its channels of a token's key (and value)
// after scaling each channel by the range it had in the chunk before.

namespace epikv {

inline ParamSpec ChunkParam() {
  return {.name = "chunk",
          .type = ParamType::kInt,
          .fallback = int64_t{128},
          .min = 1,
          .max = 65536,
          .help = "cached tokens of a chunk"};
}

class LagKv final : public ScoredPolicy {
 public:
  enum class Rows { kKeys, kKeysAndValues };
  LagKv(const Params& params, Rows rows)
      : ScoredPolicy(Granularity::kToken), chunk_(params.Int("chunk")), rows_(rows) {}

 private:
  // The mean over layers of one head's rows, oldest first. fp32 [n, width]
  template <typename RowsOf>
  static at::Tensor MeanRows(const CacheView& cache, Lane& lane, const RowsOf& rows_of) {
    at::Tensor sum = at::zeros(rows_of(0).sizes(), at::kFloat);
    at::Tensor rows =
        at::empty_like(sum);  // one for all layers: a megabyte of fresh memory is slow
    for (int64_t layer = 0; layer < cache.num_layers(); ++layer) {
      sum.add_(rows.copy_(rows_of(layer)));
    }
    return sum.div_(static_cast<double>(cache.num_layers())).index_select(0, lane.by_birth());
  }

  // The first chunk has none before it, and is not scaled. rows: [n, width] -> [n]
  at::Tensor Deviation(const at::Tensor& rows) const {
    const int64_t n = rows.size(0);
    std::vector<at::Tensor> chunks;
    for (int64_t begin = 0; begin < n; begin += chunk_) {
      at::Tensor chunk = rows.slice(0, begin, std::min(begin + chunk_, n));
      if (begin > 0) {
        const at::Tensor before = rows.slice(0, begin - chunk_, begin);
        const at::Tensor low = before.amin(0), high = before.amax(0);
        chunk = (chunk - low) / (high - low + 1e-9);
      }
      chunks.push_back(chunk);
    }
    // std(-1), which would go through the channels one by one.
    const at::Tensor scaled = at::cat(chunks);
    return (scaled - scaled.mean(-1, /*keepdim=*/true)).norm(2, -1) /
           std::sqrt(static_cast<double>(rows.size(1) - 1));
  }

  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    const CacheView& cache = task.cache;
    at::Tensor score = at::zeros(lane.index().size(0));
    for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
      score += Deviation(MeanRows(cache, lane, [&](int64_t l) { return cache.keys(l, head); }));
      if (rows_ == Rows::kKeys) continue;
      score += Deviation(MeanRows(cache, lane, [&](int64_t l) { return cache.values(l, head); }));
    }
    return lane.ToSlots(score / static_cast<double>(cache.num_kv_heads()));
  }

  const int64_t chunk_;
  const Rows rows_;
};

}  // namespace epikv
