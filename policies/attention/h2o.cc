#include "policies/attention_row.h"
#include "policies/recipe.h"
#include "policies/scored_policy.h"

namespace epikv {
namespace {

const ParamSpec kH2oParams[] = {
    ScopeParam("head: every layer and KV head keeps its own tokens; model: one mask, mass averaged "
               "over layers and heads (as in the EpiKV authors' comparison)"),
    SlackParam(0),
};

// Column `mass`: the attention probability each token received since it was cached, its own
// included; with `scope = model`, as its authors have it, from decode queries alone. Deviation from
// the paper: the query heads of a KV head share its tokens.
class H2o final : public ScoredPolicy {
 public:
  explicit H2o(Granularity granularity) : ScoredPolicy(granularity), granularity_(granularity) {}

  void Observe(absl::Span<SequenceStep> steps) const override {
    for (SequenceStep& step : steps) {
      if (step.signals.attention == nullptr) continue;
      if (granularity_ == Granularity::kHead) {
        AddPerHead(*step.signals.attention, step.cache);
      } else {
        AddMean(*step.signals.attention, step.cache);
      }
    }
  }

 private:
  static void AddPerHead(const Signals::AttentionRow& attention, CacheView& cache) {
    for (int64_t layer = 0; layer < cache.num_layers(); ++layer) {
      for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
        const absl::Span<float> mass = cache.column(0, layer, head);
        const absl::Span<const float> row = attention.at(layer, head);
        for (size_t slot = 0; slot < mass.size(); ++slot) mass[slot] += row[slot];
      }
    }
  }

  static void AddMean(const Signals::AttentionRow& attention, CacheView& cache) {
    const absl::Span<float> mass = cache.column(0, 0, 0);
    const std::vector<float> mean = MeanAttention(attention, cache);
    for (size_t slot = 0; slot < mass.size(); ++slot) mass[slot] += mean[slot];
  }

  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    const absl::Span<const float> mass = task.cache.column(0, lane.layer(), lane.head());
    return Scores({mass.begin(), mass.end()});
  }

  const Granularity granularity_;
};

}  // namespace

extern constinit const PolicySpec kH2o{
    .name = "h2o",
    .summary = "drops the tokens that attention has used least",
    .paper = "arXiv 2306.14048",
    .evidence = "golden: stevenkolawole/epiphany-kv-cache d424208 `H2OEviction` (scope = model)",
    .params = kH2oParams,
    .scores = true,
    .traits =
        [](const Params& params, const ModelShape&) {
          if (ScopeOf(params) == Granularity::kToken) {
            return PolicyTraits{.averages_heads = true,
                                .signals = Signal::kAttentionRow,
                                .columns = {"mass"},
                                .slack = params.Int("slack"),
                                .published = {.prompt = false, .sinks = 4, .recent = 128}};
          }
          return PolicyTraits{.granularity = Granularity::kHead,
                              .signals = Signal::kAttentionRow | Signal::kPromptAttention,
                              .columns = {"mass"},
                              .prompt = PromptEviction::kByChunk,
                              .slack = params.Int("slack"),
                              .published = {.prompt = false, .recent_share = 0.5}};
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<H2o>(ScopeOf(params));
    },
};

}  // namespace epikv
