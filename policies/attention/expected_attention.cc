#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

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

// The mean of the rotations at positions [first, first + count): a query before RoPE, times its
// transpose, is the query rotated by each in turn, averaged. fp32 [width, width].
at::Tensor MeanRotation(const RopeShape& rope, int64_t first, int64_t count, int64_t width) {
  at::Tensor rotation = at::eye(width);
  const int64_t pairs = static_cast<int64_t>(rope.inv_freq.size());
  auto entry = rotation.accessor<float, 2>();
  for (int64_t i = 0; i < pairs; ++i) {
    // The mean of a geometric series of e^(i angle): its middle times a Dirichlet kernel.
    const double step = rope.inv_freq[i], n = static_cast<double>(count);
    const double middle = (static_cast<double>(first) + (n - 1) / 2) * step;
    const double half = std::sin(step / 2);
    const double kernel = half == 0 ? 1 : std::sin(n * step / 2) / (n * half);
    const double scale = rope.attention_factor * kernel;
    const double cos = std::cos(middle), sin = std::sin(middle);
    const int64_t a = rope.interleaved ? 2 * i : i, b = rope.interleaved ? 2 * i + 1 : i + pairs;
    entry[a][a] = entry[b][b] = static_cast<float>(cos * scale);
    entry[b][a] = static_cast<float>(sin * scale);
    entry[a][b] = static_cast<float>(-sin * scale);
  }
  return rotation;
}

// The attention that the next queries can be expected to give a token, taken as normal with the
// mean and covariance of those so far: exp(k.mu / sqrt(d) + k cov k / 2d). Of a token that a window
// hides from some of them, as much of that as there are others.
class ExpectedAttention final : public ScoredPolicy {
 public:
  ExpectedAttention(const Params& params, const ModelShape& shape)
      : ScoredPolicy(Recipe::Of(params, Granularity::kHead)),
        ropes_(shape.ropes),
        future_(params.Int("future")),
        covariance_(params.Bool("covariance")),
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
    const at::Tensor& keys = lane.keys();  // [n, width]
    const at::Tensor rotation =
        MeanRotation(ropes_.at(lane.layer()), lane.cache().next_position(lane.layer(), lane.head()),
                     future_, keys.size(1));
    const int64_t first = lane.head() * lane.group();
    const AttentionFacts attention = lane.cache().attention(lane.layer());
    const double scale = attention.scale;
    const at::Tensor mean =
        moments.mean.narrow(0, first, lane.group()).matmul(rotation.t());  // [group, width]
    at::Tensor logits = at::matmul(mean, keys.t()).mul_(scale);            // [group, n]
    at::Tensor spread;
    if (covariance_) {
      const at::Tensor covariance = at::matmul(
          rotation, at::matmul(moments.covariance.narrow(0, first, lane.group()), rotation.t()));
      spread = at::matmul(keys, covariance).mul_(keys).sum(-1).mul_(scale * scale / 2);
    }
    if (attention.soft_cap.has_value()) {
      // The cap as its tangent at the mean: what is normal stays so.
      SoftCap(logits, attention);
      const at::Tensor slope = 1 - (logits / *attention.soft_cap).square();
      if (covariance_) spread.mul_(slope.square());
    }
    if (covariance_) logits += spread;
    if (attention.window.has_value()) logits += LogVisible(lane, *attention.window);
    at::Tensor score = ReduceGroup(
        SoftmaxOfSeen(logits.masked_fill_(outliers, -std::numeric_limits<float>::infinity())),
        gqa_);
    if (value_norm_) score = (score + epsilon_) * lane.values().norm(2, -1);
    return score.masked_fill(outliers, score.max().item<float>());
  }

  // Log of the share of the next positions whose queries see a token. [n]
  at::Tensor LogVisible(Lane& lane, int64_t window) const {
    // The query at newest + 1 + i sees a token that is no further back than window - 1 tokens.
    const at::Tensor visible = lane.index() + (window - 1 - lane.cache().newest());
    return (visible.clamp(0, future_).to(at::kFloat) / static_cast<double>(future_)).log();
  }

  const std::vector<RopeShape> ropes_;
  const int64_t future_;
  const bool covariance_, value_norm_;
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
