#include "policies/epikv/flat_score.h"
#include "policies/frozen_policy.h"
#include "policies/residual_layers.h"
#include "policies/row_stats.h"

// EpiKV-Flat. Every decode token gets one score at birth, sign x (Z(step_a) - Z(step_b)), where
// step_l is how far the residual stream after block l moved from the token before. Kept are the
// protected tokens, the reserve and the highest scores.

namespace epikv {
namespace {

const ParamSpec kEpikvFlatParams[] = {
    LayerAParam(),  LayerBParam(),    SignParam(),   StepWindowParam(),
    ReserveParam(), ReserveByParam(), SlackParam(0),
};

PolicyTraits EpikvFlatTraits(const Params& params, const ModelShape& shape) {
  return {
      .signals = SignalSet(Signal::kResidualStep) | ReserveSignals(params),
      .residual_layers = ResidualLayers(params),
      .slack = params.Int("slack"),
      .state_bytes_per_token = FrozenPolicy::kStateBytesPerToken,
      .state_bytes = static_cast<int64_t>(2 * sizeof(float)) * params.Int("window") +
                     FrozenPolicy::kStateBytesPerReserved * params.Int("reserve"),
      .uncalibrated = Uncalibrated("epikv_flat", params, shape),
  };
}

}  // namespace

extern constinit const PolicySpec kEpikvFlat{
    .name = "epikv_flat",
    .summary =
        "drops the tokens over which an early block's residual moved least and a late "
        "block's most, against the last 64",
    .paper = "arXiv 2606.26472, EpiKV-Flat",
    .evidence = "golden: stevenkolawole/epiphany-kv-cache d424208 `DetrendendHSVarianceEviction`",
    .params = kEpikvFlatParams,
    .calibrated = true,
    .complete =
        [](Params& params, const ModelShape& shape) {
          return CompleteResidualLayers("epikv_flat", params, shape);
        },
    .traits = &EpikvFlatTraits,
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      auto measure = [by = params.Choice("reserve_by")](const SequenceStep& step) {
        return NewestRowStat(step.cache, RowKind::kValue, by);
      };
      return std::make_shared<FrozenPolicy>(
          FlatScorer(params), FrozenPolicy::Reserve{params.Int("reserve"), std::move(measure)});
    },
};

}  // namespace epikv
