#include <ATen/ATen.h>

#include <algorithm>

#include "policies/attention_row.h"
#include "policies/scored_policy.h"
#include "policies/window_score.h"

namespace epikv {
namespace {

// Decode steps whose attention is kept, one a column.
constexpr absl::string_view kRows[] = {"row_0", "row_1", "row_2", "row_3",
                                       "row_4", "row_5", "row_6", "row_7"};
constexpr int64_t kNumRows = std::ssize(kRows);

const ParamSpec kRkvEpikvParams[] = {
    {.name = "lambda",
     .type = ParamType::kFloat,
     .fallback = 0.1,
     .max = 1,
     .help = "weight of importance, against that of redundancy"},
    PoolKernelParam(7),
    SlackParam(127),
};

// In double: redundancies are nearly alike.
at::Tensor Standardised(const at::Tensor& x) {
  const at::Tensor wide = x.to(at::kDouble);
  return (wide - wide.mean()) / (wide.std() + 1e-8);
}

class RKvEpikv final : public ScoredPolicy {
 public:
  explicit RKvEpikv(const Params& params)
      : ScoredPolicy(Granularity::kToken),
        lambda_(params.Float("lambda")),
        kernel_(params.Int("kernel")) {}

  // Writes the newest query's row, averaged over all lanes, over the oldest one kept.
  void Observe(absl::Span<SequenceStep> steps) const override {
    for (SequenceStep& step : steps) {
      if (step.phase == Phase::kPrefill) continue;
      CacheView& cache = step.cache;
      const std::vector<float> mean = MeanAttention(*step.signals.attention, cache);
      std::copy(mean.begin(), mean.end(), cache.column(step.first % kNumRows, 0, 0).begin());
    }
  }

 private:
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    CacheView& cache = task.cache;
    std::vector<at::Tensor> rows;
    for (int64_t i = 0; i < kNumRows; ++i) {
      const absl::Span<const float> row = cache.column(i, 0, 0);
      rows.push_back(at::tensor(at::ArrayRef<float>(row.data(), row.size())));
    }
    // Rows of steps that have not been are zeros.
    const int64_t seen = std::min(kNumRows, cache.newest() + 1 - cache.prompt_tokens());
    const at::Tensor importance = lane.ToSlots(
        PoolNeighbours(at::stack(rows).index_select(1, lane.by_birth()), kernel_, "max").sum(0) /
        seen);
    return lambda_ * Standardised(importance) - (1 - lambda_) * Standardised(Redundancy(cache));
  }

  // The share of each token's mean cosine with the others, averaged over all lanes. [n]
  static at::Tensor Redundancy(CacheView& cache) {
    at::Tensor sum;
    for (int64_t layer = 0; layer < cache.num_layers(); ++layer) {
      for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
        const at::Tensor keys = cache.keys(layer, head).to(at::kFloat);
        const at::Tensor unit = keys / (keys.norm(2, -1, /*keepdim=*/true) + 1e-8);
        const at::Tensor share =
            ((unit.matmul(unit.sum(0)) - 1) / unit.size(0)).softmax(-1);  // itself left out
        sum = sum.defined() ? sum + share : share;
      }
    }
    at::Tensor mean = sum / (cache.num_layers() * cache.num_kv_heads());
    cache.AverageOverRanks({mean.mutable_data_ptr<float>(), static_cast<size_t>(mean.numel())});
    return mean;
  }

  const double lambda_;
  const int64_t kernel_;
};

}  // namespace

extern constinit const PolicySpec kRkvEpikv{
    .name = "rkv_epikv",
    .summary = "rkv as in the EpiKV authors' comparison: one mask, both terms standardised",
    .paper = "arXiv 2606.26472, R-KV baseline",
    .evidence = "golden: stevenkolawole/epiphany-kv-cache d424208 `RKVEviction`",
    .params = kRkvEpikvParams,
    .scores = true,
    .complete = [](Params& params, const ModelShape&) { return CheckWindow(params); },
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.averages_heads = true,
                              .signals = Signal::kAttentionRow | Signal::kKeys,
                              .columns = {std::begin(kRows), std::end(kRows)},
                              .slack = params.Int("slack"),
                              .published = {.prompt = false, .recent = kNumRows}};
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<RKvEpikv>(params);
    },
};

}  // namespace epikv
