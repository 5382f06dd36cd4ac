#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "policies/segment_policy.h"

namespace epikv {
namespace {

constexpr absl::string_view kVariants[] = {"simplified", "faithful"};

const ParamSpec kThinkvParams[] = {
    {.name = "variant",
     .type = ParamType::kChoice,
     .fallback = std::string("simplified"),
     .choices = kVariants,
     .help = "simplified: types by tertiles, anew in every round; faithful: by the deepest valleys "
             "of the entropies' density, anew every `refresh` tokens"},
    {.name = "refresh",
     .type = ParamType::kInt,
     .fallback = int64_t{128},
     .min = 1,
     .max = 65536,
     .help = "faithful: decode tokens between classifications, unless the number of segments "
             "changes"},
    ClassifierLayersParam(),
    SegmentParam(),
    RetainReasoningParam(),
    RetainExecutionParam(),
    RetainTransitionParam(),
    SlackParam(0),
};

// The positions of the two deepest valleys of a Gaussian density estimate, ascending; none if there
// are fewer. In fp32, as published: where the density underflows to 0 the valley begins.
std::optional<std::pair<double, double>> Valleys(const std::vector<double>& entropies) {
  constexpr int64_t kPoints = 256;
  const int64_t n = std::ssize(entropies);
  if (n < 4) return std::nullopt;
  const at::Tensor x = at::tensor(at::ArrayRef<double>(entropies), at::kDouble).to(at::kFloat);
  const double deviation = x.std().item<double>();
  const double quartiles =
      at::quantile(x, 0.75).item<double>() - at::quantile(x, 0.25).item<double>();
  // Silverman's rule.
  const double spread = quartiles > 0 ? std::min(deviation, quartiles / 1.349) : deviation;
  const double bandwidth = 0.9 * spread * std::pow(n, -0.2);
  if (!(bandwidth > 0)) return std::nullopt;
  const at::Tensor grid = at::linspace(x.min().item(), x.max().item(), kPoints);
  const at::Tensor z = (grid.unsqueeze(1) - x.unsqueeze(0)) / bandwidth;  // [points, n]
  const at::Tensor density = at::exp(-0.5 * z * z).sum(1);
  const float* position = grid.const_data_ptr<float>();
  const float* d = density.const_data_ptr<float>();
  std::vector<std::pair<float, float>> valleys;  // (density, position)
  for (int64_t i = 1; i + 1 < kPoints; ++i) {
    if (d[i] < d[i - 1] && d[i] <= d[i + 1]) valleys.emplace_back(d[i], position[i]);
  }
  if (valleys.size() < 2) return std::nullopt;
  std::sort(valleys.begin(), valleys.end());
  return std::minmax(valleys[0].second, valleys[1].second);
}

struct TypesState final : PolicyState {
  std::unique_ptr<PolicyState> Clone() const override {
    return std::make_unique<TypesState>(*this);
  }

  int64_t decoded = 0;
  std::vector<SegmentType> types;  // of the last classification
};

// Column 0: the newest query's attention in the last layer; column 1: in the last few.
class ThinKv final : public SegmentPolicy {
 public:
  explicit ThinKv(const Params& params)
      : SegmentPolicy(params),
        faithful_(params.Choice("variant") == "faithful"),
        refresh_(params.Int("refresh")),
        classifier_layers_(params.Int("classifier_layers")) {}

  std::unique_ptr<PolicyState> NewState(const SequenceInfo&) const override {
    return faithful_ ? std::make_unique<TypesState>() : nullptr;
  }

  void Observe(absl::Span<SequenceStep> steps) const override {
    for (SequenceStep& step : steps) {
      if (step.phase == Phase::kPrefill) continue;
      ObserveLastLayers(step, 1, 0);
      ObserveLastLayers(step, classifier_layers_, 1);
      if (faithful_) ++static_cast<TypesState*>(step.state)->decoded;
    }
  }

 private:
  absl::StatusOr<std::vector<SegmentType>> Classify(const EvictionTask& task,
                                                    const Segments& segments) const override {
    const std::vector<double> entropies = segments.Entropies(task.cache.column(1, 0, 0));
    absl::StatusOr<std::vector<SegmentType>> types = TypesByTertiles(entropies, Reasoning::kLow);
    if (!faithful_ || !types.ok()) return types;
    TypesState& state = *static_cast<TypesState*>(task.state);
    // As in the authors' code, a refresh happens in a round or not at all: the tokens at whose
    // round it is due are rare, and types may be applied to segments they were not made of.
    if (state.types.size() == entropies.size() && state.decoded % refresh_ != 0) return state.types;
    if (const auto valleys = Valleys(entropies)) {
      types = TypesByBounds(entropies, Reasoning::kLow, valleys->first, valleys->second);
    }
    state.types = *types;
    return types;
  }

  const bool faithful_;
  const int64_t refresh_, classifier_layers_;
};

PolicyTraits ThinkvTraits(const Params& params, const ModelShape& shape) {
  const bool faithful = params.Choice("variant") == "faithful";
  return {
      .averages_heads = true,
      .signals = Signal::kAttentionRow,
      .attention_layers = ClassifierLayers(params, shape),
      .columns = {"score", "attention"},
      .slack = params.Int("slack"),
      .published = {.prompt = false},
      // A segment may be one token.
      .state_bytes_per_token = faithful ? int64_t{sizeof(SegmentType)} : 0,
  };
}

}  // namespace

extern constinit const PolicySpec kThinkv{
    .name = "thinkv",
    .summary =
        "keeps the most attended tokens of each segment, more of segments on few of whose tokens "
        "attention falls",
    .paper = "arXiv 2606.26472, ThinKV baseline (not ThinKV itself, arXiv 2510.01290)",
    .evidence =
        "golden: stevenkolawole/epiphany-kv-cache d424208 `ThinKVEviction`, "
        "stevenkolawole/epiphany-kv-cache d424208 `ThinKVFaithfulEviction`",
    .params = kThinkvParams,
    .traits = &ThinkvTraits,
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<ThinKv>(params);
    },
};

}  // namespace epikv
