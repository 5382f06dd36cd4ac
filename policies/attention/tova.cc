#include <ATen/ATen.h>

#include "policies/newest_attention.h"
#include "policies/scored_policy.h"

namespace epikv {
namespace {

const ParamSpec kTovaParams[] = {SlackParam(0)};

// Column `weight`: what the newest query gave the token, averaged over all query heads of the
// layer.
class Tova final : public ScoredPolicy {
 public:
  Tova() : ScoredPolicy(Granularity::kLayer) {}

  void Observe(absl::Span<SequenceStep> steps) const override {
    for (SequenceStep& step : steps) {
      if (!EndsInQuery(step)) continue;
      const int64_t heads = step.cache.num_kv_heads();
      for (int64_t layer = 0; layer < step.cache.num_layers(); ++layer) {
        at::Tensor weight = Lane(step.cache, layer, 0).column(0).zero_();
        for (int64_t head = 0; head < heads; ++head) weight += NewestAttention(step, layer, head);
        weight /= heads;
        step.cache.AverageOverRanks(step.cache.column(0, layer, 0));
      }
    }
  }

 private:
  at::Tensor Score(const EvictionTask&, Lane& lane) const override { return lane.column(0); }
};

}  // namespace

extern constinit const PolicySpec kTova{
    .name = "tova",
    .summary = "drops the tokens to which the newest query attends least, per layer",
    .paper = "arXiv 2401.06104",
    .evidence = "golden: kvpress 0.5.5 `TOVAPress`",
    .params = kTovaParams,
    .scores = true,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.granularity = Granularity::kLayer,
                              .averages_heads = true,
                              .signals = kNewestAttention,
                              .window = 1,
                              .columns = {"weight"},
                              .prompt = PromptEviction::kAtEnd,
                              .slack = params.Int("slack"),
                              .published = {.prompt = false, .recent = 1}};
        },
    .make = [](const Params&, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Tova>();
    },
};

}  // namespace epikv
