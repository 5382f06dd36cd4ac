#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "policies/recipe.h"
#include "policies/scored_policy.h"
#include "policies/window_score.h"

namespace epikv {
namespace {

constexpr int64_t kEntropy = 0, kDistance = 1;  // columns

const ParamSpec kInfokvParams[] = {
    WindowParam(64),
    PoolKernelParam(9),
    PoolModeParam("avg"),
    GqaParam("mean"),
    {.name = "attention_share",
     .type = ParamType::kFloat,
     .fallback = 0.9,
     .max = 1,
     .help = "weight of the window's attention; the rest is information's"},
    {.name = "tau",
     .type = ParamType::kFloat,
     .fallback = 1.0,
     .max = 100,
     .help = "added to a residual's distance from the last, so that late layers count too"},
    SlackParam(1023),
};

// a A + (1 - a) softmax((D + tau) H): the window's attention, and how uncertain the model was at
// the token (H) in the layers where its residual was still far from the last one (D).
class InfoKv final : public ScoredPolicy {
 public:
  explicit InfoKv(const Params& params)
      : ScoredPolicy(Granularity::kHead),
        params_(params),
        share_(params.Float("attention_share")),
        tau_(params.Float("tau")) {}

  void Observe(absl::Span<SequenceStep> steps) const override {
    for (SequenceStep& step : steps) {
      for (int64_t layer = 0; layer < step.cache.num_layers(); ++layer) {
        for (int64_t head = 0; head < step.cache.num_kv_heads(); ++head) Note(step, layer, head);
      }
    }
  }

 private:
  static void Note(SequenceStep& step, int64_t layer, int64_t head) {
    const absl::Span<const int32_t> index = step.cache.index(layer, head);
    const absl::Span<float> entropy = step.cache.column(kEntropy, layer, head);
    const absl::Span<float> distance = step.cache.column(kDistance, layer, head);
    for (size_t slot = 0; slot < index.size(); ++slot) {
      const int64_t place = index[slot] - step.first;
      if (place < 0) continue;
      entropy[slot] = step.signals.logit_entropy[place];
      distance[slot] = step.signals.residual_distance[layer * step.count + place];
    }
  }

  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    // Both are brought to a sum of 1 over the tokens before the window.
    const at::Tensor candidates =
        lane.index().le(lane.cache().newest() - lane.queries().size(1)).to(at::kFloat);
    const at::Tensor attention = WindowScore(lane, lane.window_attention(), params_);
    const at::Tensor seen = attention / (attention * candidates).sum().clamp_min(1e-30);
    const at::Tensor surprise = (lane.column(kDistance) + tau_) * lane.column(kEntropy);
    // A token of the window may surprise more than all candidates: theirs is the scale.
    const at::Tensor most =
        surprise.masked_fill(candidates == 0, -std::numeric_limits<float>::infinity()).max();
    const at::Tensor mass = (surprise - most).clamp_max(0).exp();
    const at::Tensor information = mass / (mass * candidates).sum().clamp_min(1e-30);
    return share_ * seen + (1 - share_) * information;
  }

  const Params params_;
  const double share_, tau_;
};

}  // namespace

extern constinit const PolicySpec kInfokv{
    .name = "infokv",
    .summary =
        "drops the tokens that the newest queries see least and at which the model was most "
        "certain of the next token",
    .paper = "arXiv 2606.26875 (InfoKV)",
    .evidence = "cases: infokv_test.cc",
    .params = kInfokvParams,
    .scores = true,
    .complete = [](Params& params, const ModelShape&) { return CheckWindow(params); },
    .traits =
        [](const Params& params, const ModelShape&) {
          PolicyTraits traits =
              WindowTraits(params, Signal::kLogitEntropy | Signal::kResidualDistance);
          traits.columns = {"entropy", "distance"};
          return traits;
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<InfoKv>(params);
    },
};

}  // namespace epikv
