#include <ATen/ATen.h>

#include "policies/residual_layers.h"
#include "policies/row_stats.h"
#include "policies/segment_policy.h"

namespace epikv {
namespace {

constexpr absl::string_view kClassifiers[] = {"key_variance", "entropy"};

const ParamSpec kEpikvSegParams[] = {
    LayerAParam(),
    LayerBParam(),
    SignParam(),
    StepWindowParam(),
    {.name = "classifier",
     .type = ParamType::kChoice,
     .fallback = std::string("key_variance"),
     .choices = kClassifiers,
     .help = "key_variance: segments whose keys vary most over their channels are reasoning; "
             "entropy: those in which few tokens have most of that variance"},
    SegmentParam(),
    RetainReasoningParam(),
    RetainExecutionParam(),
    RetainTransitionParam(),
    ReserveParam(),
    ReserveByParam(),
    SlackParam(0),
};

absl::Span<const float> Floats(const at::Tensor& x) {
  return {x.const_data_ptr<float>(), static_cast<size_t>(x.numel())};
}

// The variance of each token's key after averaging it over layers. fp32 [used], by slot
at::Tensor VarianceOfMeanKey(const CacheView& cache) {
  at::Tensor sum = at::zeros(static_cast<int64_t>(cache.index(0, 0).size()));
  for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
    at::Tensor key = cache.keys(0, head).to(at::kFloat);
    for (int64_t layer = 1; layer < cache.num_layers(); ++layer) {
      key = key + cache.keys(layer, head);
    }
    sum += RowStat(key / static_cast<double>(cache.num_layers()), "variance");
  }
  return sum / static_cast<double>(cache.num_kv_heads());
}

class Seg final : public FlatSegmentPolicy {
 public:
  explicit Seg(const Params& params)
      : FlatSegmentPolicy(params), by_entropy_(params.Choice("classifier") == "entropy") {}

 private:
  absl::StatusOr<std::vector<SegmentType>> Classify(const EvictionTask& task,
                                                    const Segments& segments) const override {
    if (by_entropy_) {
      return TypesByTertiles(segments.Entropies(Floats(VarianceOfMeanKey(task.cache))),
                             Reasoning::kLow);
    }
    const at::Tensor variance = MeanRowStat(task.cache, RowKind::kKey, "variance");
    return TypesByTertiles(segments.Means(Floats(variance)), Reasoning::kHigh);
  }

  const bool by_entropy_;
};

PolicyTraits EpikvSegTraits(const Params& params, const ModelShape& shape) {
  return {
      .signals = Signal::kResidualStep | Signal::kKeys | ReserveSignals(params),
      .residual_layers = ResidualLayers(params),
      .columns = {"score"},
      .slack = params.Int("slack"),
      .state_bytes = static_cast<int64_t>(2 * sizeof(float)) * params.Int("window"),
      // The score is epikv_flat's, and so is its calibration.
      .uncalibrated = Uncalibrated("epikv_flat", params, shape),
  };
}

}  // namespace

extern constinit const PolicySpec kEpikvSeg{
    .name = "epikv_seg",
    .summary =
        "keeps the best epikv_flat scores of each segment, more of segments whose keys vary more",
    .paper = "arXiv 2606.26472, EpiKV-Seg",
    .evidence =
        "golden: stevenkolawole/epiphany-kv-cache d424208 `KVSegHSEviction`, "
        "stevenkolawole/epiphany-kv-cache d424208 `KVSegmentHSEviction`",
    .params = kEpikvSegParams,
    .complete =
        [](Params& params, const ModelShape& shape) {
          return CompleteResidualLayers("epikv_flat", params, shape);
        },
    .traits = &EpikvSegTraits,
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Seg>(params);
    },
};

}  // namespace epikv
