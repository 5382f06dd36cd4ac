#include "policies/epikv/flat_score.h"
#include "policies/frozen_policy.h"
#include "policies/residual_layers.h"

namespace epikv {
namespace {

const ParamSpec kEpikvHsVarianceParams[] = {
    LayerAParam(), LayerBParam(), SignParam(), StepWindowParam(), SlackParam(0),
};

// sign x (M(step_a) - M(step_b)), M being the mean of the last `window` steps. Not a variance, and
// the two blocks are not brought to one scale.
FrozenPolicy::Scorer EpikvHsVarianceScorer(const Params& params) {
  const int64_t window = params.Int("window");
  return [moved = StepPair(params), sign = static_cast<double>(params.Int("sign")),
          a = RollingMean(window), b = RollingMean(window)](const SequenceStep& step) mutable {
    return static_cast<float>(sign * (a.Push(moved.a(step)) - b.Push(moved.b(step))));
  };
}

PolicyTraits EpikvHsVarianceTraits(const Params& params, const ModelShape& shape) {
  return {
      .signals = Signal::kResidualStep,
      .residual_layers = ResidualLayers(params),
      .slack = params.Int("slack"),
      .state_bytes_per_token = FrozenPolicy::kStateBytesPerToken,
      .state_bytes = static_cast<int64_t>(2 * sizeof(float)) * params.Int("window"),
      .uncalibrated = Uncalibrated("epikv_hs_variance", params, shape),
  };
}

}  // namespace

extern constinit const PolicySpec kEpikvHsVariance{
    .name = "epikv_hs_variance",
    .summary =
        "drops the tokens of stretches in which an early block's residual moved little and a late "
        "block's much",
    .paper = "arXiv 2606.26472, HS-variance",
    .evidence = "golden: stevenkolawole/epiphany-kv-cache d424208 `HSVarianceEviction`",
    .params = kEpikvHsVarianceParams,
    .calibrated = true,
    .complete =
        [](Params& params, const ModelShape& shape) {
          return CompleteResidualLayers("epikv_hs_variance", params, shape);
        },
    .traits = &EpikvHsVarianceTraits,
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<FrozenPolicy>(EpikvHsVarianceScorer(params));
    },
};

}  // namespace epikv
