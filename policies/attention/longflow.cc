#include <ATen/ATen.h>

#include "policies/newest_attention.h"
#include "policies/recipe.h"
#include "policies/scored_policy.h"

namespace epikv {
namespace {

const ParamSpec kLongflowParams[] = {
    ScopeParam("head: every layer and KV head keeps its own tokens; model: one mask, attention and "
               "norm each averaged over layers and heads (as in the EpiKV authors' comparison)"),
    SlackParam(0),
};

constexpr int64_t kWeight = 0, kNorm = 1;  // columns

// How much a token puts into the newest query's output: its weight times the L1 norm of its value.
class LongFlow final : public ScoredPolicy {
 public:
  explicit LongFlow(Granularity granularity)
      : ScoredPolicy(granularity), granularity_(granularity) {}

  void Observe(absl::Span<SequenceStep> steps) const override {
    for (SequenceStep& step : steps) {
      if (!EndsInQuery(step)) continue;
      CacheView& cache = step.cache;
      for (int64_t layer = 0; layer < cache.num_layers(); ++layer) {
        for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
          at::Tensor weight = Lane(cache, layer, head).column(kWeight);
          if (First(layer, head)) weight.zero_();
          weight.add_(NewestAttention(step, layer, head), 1.0 / Sharing(cache));
        }
      }
      if (granularity_ == Granularity::kToken) cache.AverageOverRanks(cache.column(kWeight, 0, 0));
    }
  }

 private:
  // Of the lanes that share a column, the first. With `scope = model` it is the mean of all.
  bool First(int64_t layer, int64_t head) const {
    return granularity_ == Granularity::kHead || (layer == 0 && head == 0);
  }
  int64_t Sharing(const CacheView& cache) const {
    return granularity_ == Granularity::kHead ? 1 : cache.num_layers() * cache.num_kv_heads();
  }

  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    // A value never changes, and neither does its norm: 0 until it is first asked for.
    const at::Tensor norm = lane.column(kNorm);
    const at::Tensor missing = norm.eq(0).nonzero().flatten();
    const int64_t first = lane.layer() * task.cache.num_kv_heads() + lane.head();
    at::Tensor sum = at::zeros(missing.size(0));
    for (int64_t i = first; i < first + Sharing(task.cache); ++i) {
      const int64_t heads = task.cache.num_kv_heads();
      sum += task.cache.values(i / heads, i % heads)
                 .index_select(0, missing)
                 .to(at::kFloat)
                 .norm(1, -1);
    }
    sum /= Sharing(task.cache);
    if (granularity_ == Granularity::kToken) {
      task.cache.AverageOverRanks(
          {sum.mutable_data_ptr<float>(), static_cast<size_t>(sum.numel())});
    }
    norm.index_copy_(0, missing, sum);
    return lane.column(kWeight) * norm;
  }

  const Granularity granularity_;
};

}  // namespace

extern constinit const PolicySpec kLongflow{
    .name = "longflow",
    .summary = "drops the tokens that put least into the newest token's attention output",
    .paper = "arXiv 2603.11504",
    .evidence =
        "golden: stevenkolawole/epiphany-kv-cache d424208 `LongFlowEviction` (scope = head: "
        "one lane at a time)",
    .params = kLongflowParams,
    .scores = true,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.granularity = ScopeOf(params),
                              .averages_heads = true,
                              .signals = kNewestAttention | Signal::kValues,
                              .window = 1,
                              .columns = {"weight", "norm"},
                              .prompt = PromptEviction::kAtEnd,
                              .slack = params.Int("slack"),
                              .published = {.prompt = false, .recent = 0}};
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<LongFlow>(ScopeOf(params));
    },
};

}  // namespace epikv
