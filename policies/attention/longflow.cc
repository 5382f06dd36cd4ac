#include <ATen/ATen.h>

#include "policies/recipe.h"
#include "policies/scored_policy.h"

namespace epikv {
namespace {

const ParamSpec kParams[] = {
    ScopeParam("head: every layer and KV head keeps its own tokens; model: one mask, attention and "
               "norm each averaged over layers and heads (as in the EpiKV authors' comparison)"),
    SlackParam(0),
};

// How much a token puts into the newest query's output: its weight times the L1 norm of its value.
class LongFlow final : public ScoredPolicy {
 public:
  explicit LongFlow(Granularity granularity)
      : ScoredPolicy(granularity), granularity_(granularity) {}

 private:
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    if (granularity_ == Granularity::kHead) return Weight(lane) * Norm(lane);
    CacheView& cache = task.cache;
    at::Tensor weight = at::zeros(lane.index().size(0)), norm = at::zeros_like(weight);
    for (int64_t layer = 0; layer < cache.num_layers(); ++layer) {
      for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
        Lane each(cache, layer, head);
        weight += Weight(each);
        norm += Norm(each);
      }
    }
    const double lanes = cache.num_layers() * cache.num_kv_heads();
    return weight / lanes * (norm / lanes);
  }

  // [n]
  static at::Tensor Weight(Lane& lane) { return lane.window_attention().mean({0, 1}); }
  static at::Tensor Norm(Lane& lane) { return lane.values().norm(1, -1); }

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
    .params = kParams,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.granularity = ScopeOf(params),
                              .signals = Signal::kKeys | Signal::kValues | Signal::kQueries,
                              .window = 1,
                              .prompt = PromptEviction::kAtEnd,
                              .slack = params.Int("slack"),
                              .published = {.prompt = false, .recent = 0}};
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<LongFlow>(ScopeOf(params));
    },
};

}  // namespace epikv
