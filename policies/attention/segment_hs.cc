#include "policies/residual_layers.h"
#include "policies/segment_policy.h"

namespace epikv {
namespace {

const ParamSpec kSegmentHsParams[] = {
    LayerAParam(),          LayerBParam(),           SignParam(),
    StepWindowParam(),      ClassifierLayersParam(), SegmentParam(),
    RetainReasoningParam(), RetainExecutionParam(),  RetainTransitionParam(),
    SlackParam(0),
};

// epikv_seg with ThinKV's classifier. Column 1: the newest query's attention.
class SegmentHs final : public FlatSegmentPolicy {
 public:
  explicit SegmentHs(const Params& params)
      : FlatSegmentPolicy(params), classifier_layers_(params.Int("classifier_layers")) {}

  void Observe(absl::Span<SequenceStep> steps) const override {
    FlatSegmentPolicy::Observe(steps);
    for (SequenceStep& step : steps) {
      if (step.phase == Phase::kDecode) ObserveLastLayers(step, classifier_layers_, 1);
    }
  }

 private:
  absl::StatusOr<std::vector<SegmentType>> Classify(const EvictionTask& task,
                                                    const Segments& segments) const override {
    return TypesByTertiles(segments.Entropies(task.cache.column(1, 0, 0)), Reasoning::kLow);
  }

  const int64_t classifier_layers_;
};

PolicyTraits SegmentHsTraits(const Params& params, const ModelShape& shape) {
  return {
      .averages_heads = true,
      .signals = Signal::kResidualStep | Signal::kAttentionRow,
      .residual_layers = ResidualLayers(params),
      .attention_layers = ClassifierLayers(params, shape),
      .columns = {"score", "attention"},
      .slack = params.Int("slack"),
      .state_bytes = static_cast<int64_t>(2 * sizeof(float)) * params.Int("window"),
      // The score is epikv_flat's, and so is its calibration.
      .uncalibrated = Uncalibrated("epikv_flat", params, shape),
  };
}

}  // namespace

extern constinit const PolicySpec kSegmentHs{
    .name = "segment_hs",
    .summary =
        "keeps the best epikv_flat scores of each segment, more of segments on few of whose tokens "
        "attention falls",
    .paper = "arXiv 2606.26472, Segment-HS (withdrawn by its authors)",
    .evidence = "golden: stevenkolawole/epiphany-kv-cache d424208 `HybridSegmentHSEviction`",
    .params = kSegmentHsParams,
    .complete =
        [](Params& params, const ModelShape& shape) {
          return CompleteResidualLayers("epikv_flat", params, shape);
        },
    .traits = &SegmentHsTraits,
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<SegmentHs>(params);
    },
};

}  // namespace epikv
