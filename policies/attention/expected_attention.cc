#include <ATen/ATen.h>

#include <limits>
#include <optional>

#include "policies/expected_queries.h"
#include "policies/recipe.h"
#include "policies/scored_policy.h"
#include "policies/window_score.h"

namespace epikv {
namespace {

const ParamSpec kExpectedAttentionParams[] = {
    {.name = "future",
     .type = ParamType::kInt,
     .fallback = int64_t{512},
     .min = 1,
     .max = 65536,
     .help = "next positions over which the queries' rotation is averaged"},
    {.name = "covariance",
     .type = ParamType::kBool,
     .fallback = true,
     .help = "whether the queries' spread counts beside their mean"},
    {.name = "value_norm",
     .type = ParamType::kBool,
     .fallback = true,
     .help = "whether scores are weighted by the L2 norms of the values"},
    {.name = "epsilon",
     .type = ParamType::kFloat,
     .fallback = 0.0,
     .max = 1,
     .help = "added to the expected attention before that"},
    GqaParam("mean"),
    AllocatorParam(),
    FloorParam(),
    SlackParam(63),
};

// The attention that the next queries can be expected to give a token, taken as normal with the
// mean and covariance of those so far: exp(k.mu / sqrt(d) + k cov k / 2d). Of a token that a window
// hides from some of them, as much of that as there are others.
class ExpectedAttention final : public ScoredPolicy {
 public:
  ExpectedAttention(const Params& params, const ModelShape& shape)
      : ScoredPolicy(Recipe::Of(params, Granularity::kHead)),
        ropes_(shape.ropes),
        queries_{.future = params.Int("future"), .covariance = params.Bool("covariance")},
        value_norm_(params.Bool("value_norm")),
        epsilon_(params.Float("epsilon")),
        gqa_(params.Choice("gqa")) {}

 private:
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    // The first tokens are outliers as keys too: the others share the attention without them, and
    // they rank first.
    const at::Tensor outliers = lane.index() < CacheView::kFirstMeasuredQuery;
    if (outliers.all().item<bool>()) return at::zeros(outliers.size(0));
    const CacheView::QueryMoments moments = lane.cache().query_moments(lane.layer());
    const std::optional<int64_t> window = lane.cache().attention(lane.layer()).window;
    at::Tensor logits =
        queries_.Logits(lane, lane.keys(), moments, ropes_.at(lane.layer()));  // [group, n]
    if (window.has_value()) logits += queries_.LogVisible(lane, *window);
    at::Tensor score = ReduceGroup(
        SoftmaxOfSeen(logits.masked_fill_(outliers, -std::numeric_limits<float>::infinity())),
        gqa_);
    if (value_norm_) score = (score + epsilon_) * lane.values().norm(2, -1);
    return score.masked_fill(outliers, score.max().item<float>());
  }

  const std::vector<RopeShape> ropes_;
  const ExpectedQueries queries_;
  const bool value_norm_;
  const double epsilon_;
  const std::string gqa_;
};

}  // namespace

extern constinit const PolicySpec kExpectedAttention{
    .name = "expected_attention",
    .summary =
        "drops the tokens to which the next queries, of the mean and covariance of those so "
        "far, can be expected to attend least",
    .paper = "arXiv 2510.00636 (Expected Attention)",
    .evidence = "golden: kvpress 0.5.5 `ExpectedAttentionPress`",
    .params = kExpectedAttentionParams,
    .scores = true,
    .complete =
        [](Params& params, const ModelShape&) {
          return CheckRecipe(params, {ScoreKind::kMass, Comparable::kLayer});
        },
    .traits =
        [](const Params& params, const ModelShape&) {
          PolicyTraits traits{
              .granularity = Granularity::kHead,
              .signals = Signal::kKeys | Signal::kQueryMoments,
              .prompt = PromptEviction::kAtEnd,
              .slack = params.Int("slack"),
              .published = {.sinks = 4},
          };
          if (params.Bool("value_norm")) traits.signals = traits.signals | Signal::kValues;
          AddRecipe(params, traits);
          return traits;
        },
    .lane_budgets = &RecipeLaneBudgets,
    .make = [](const Params& params, const ModelShape& shape) -> std::shared_ptr<const Policy> {
      return std::make_shared<ExpectedAttention>(params, shape);
    },
};

}  // namespace epikv
