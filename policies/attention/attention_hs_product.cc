#include <algorithm>
#include <limits>

#include "policies/attention_row.h"
#include "policies/epikv/flat_score.h"
#include "policies/residual_layers.h"
#include "policies/row_stats.h"
#include "policies/scored_policy.h"

namespace epikv {
namespace {

const ParamSpec kAttentionHsProductParams[] = {
    {.name = "layer_a",
     .type = ParamType::kInt,
     .max = 4095,
     .help =
         "block (0-based) whose large steps mark a token as worth keeping. Default: at 0.344 of "
         "the model's depth"},
    {.name = "window",
     .type = ParamType::kInt,
     .fallback = int64_t{64},
     .min = 2,
     .max = 65536,
     .help = "tokens a step is compared with"},
    {.name = "alpha",
     .type = ParamType::kFloat,
     .fallback = 1.0,
     .max = 1000,
     .help = "weight of the residual step beside attention"},
    SlackParam(0),
};

struct StepState final : PolicyState {
  explicit StepState(int64_t window) : z(window) {}
  std::unique_ptr<PolicyState> Clone() const override { return std::make_unique<StepState>(*this); }

  RollingZ z;
};

// x, between the least and the most it can be, on a scale from 0 to 1.
struct Scale {
  explicit Scale(const std::vector<float>& of)
      : low(*std::min_element(of.begin(), of.end())),
        width(*std::max_element(of.begin(), of.end()) - low + 1e-9) {}
  double operator()(float x) const { return (x - low) / width; }

  double low, width;
};

// Column `mass`: the attention each token received since the first decode step; column `z`: the
// z-score of its residual step. Both on a scale from the least to the most of the decode tokens
// that are cached; the score is their sum, in spite of the name.
class AttentionHsProduct final : public ScoredPolicy {
 public:
  explicit AttentionHsProduct(const Params& params)
      : ScoredPolicy(Granularity::kToken),
        window_(params.Int("window")),
        alpha_(params.Float("alpha")) {}

  std::unique_ptr<PolicyState> NewState(const SequenceInfo&) const override {
    return std::make_unique<StepState>(window_);
  }

  void Observe(absl::Span<SequenceStep> steps) const override {
    for (SequenceStep& step : steps) {
      if (step.phase == Phase::kPrefill) continue;
      const absl::Span<float> mass = step.cache.column(0, 0, 0);
      const std::vector<float> row = MeanAttention(*step.signals.attention, step.cache);
      for (size_t slot = 0; slot < mass.size(); ++slot) mass[slot] += row[slot];
      RollingZ& z = static_cast<StepState*>(step.state)->z;
      step.cache.column(1, 0, 0)[SlotOf(step.cache, step.first)] =
          static_cast<float>(z.Push(step.signals.residual_step[0]));
    }
  }

 private:
  at::Tensor Score(const EvictionTask& task, Lane&) const override {
    CacheView& cache = task.cache;
    const absl::Span<const int32_t> index = cache.index(0, 0);
    const absl::Span<const float> mass = cache.column(0, 0, 0), z = cache.column(1, 0, 0);
    std::vector<float> decoded_mass, decoded_z;
    for (size_t slot = 0; slot < index.size(); ++slot) {
      if (index[slot] < cache.prompt_tokens()) continue;
      decoded_mass.push_back(mass[slot]);
      decoded_z.push_back(z[slot]);
    }
    // The prompt has no z-score: what of it is unprotected goes first.
    std::vector<float> score(index.size(), -std::numeric_limits<float>::infinity());
    if (decoded_mass.empty()) return Scores(score);
    const Scale scaled_mass(decoded_mass), scaled_z(decoded_z);
    for (size_t slot = 0; slot < index.size(); ++slot) {
      if (index[slot] < cache.prompt_tokens()) continue;
      score[slot] = static_cast<float>(scaled_mass(mass[slot]) + alpha_ * scaled_z(z[slot]));
    }
    return Scores(score);
  }

  const int64_t window_;
  const double alpha_;
};

absl::Status AttentionHsProductComplete(Params& params, const ModelShape& shape) {
  if (!params.Has("layer_a")) params.Set("layer_a", BlockAtDepth(0.344, shape.num_layers));
  return CheckBlock(params, "layer_a", shape);
}

}  // namespace

extern constinit const PolicySpec kAttentionHsProduct{
    .name = "attention_hs_product",
    .summary = "drops the tokens that attention used least and over which the residual moved least",
    .paper = "arXiv 2606.26472, appendix, Attn x HS",
    .evidence = "golden: stevenkolawole/epiphany-kv-cache d424208 `AttentionHSProductEviction`",
    .params = kAttentionHsProductParams,
    .scores = true,
    .complete = &AttentionHsProductComplete,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{
              .averages_heads = true,
              .signals = Signal::kResidualStep | Signal::kAttentionRow,
              .residual_layers = {params.Int("layer_a")},
              .columns = {"mass", "z"},
              .slack = params.Int("slack"),
              .published = {.sinks = 4},
              .state_bytes = static_cast<int64_t>(sizeof(float)) * params.Int("window"),
              .uncalibrated = true,
          };
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<AttentionHsProduct>(params);
    },
};

}  // namespace epikv
