#include <ATen/ATen.h>

#include "policies/lookahead.h"
#include "policies/recipe.h"
#include "policies/scored_policy.h"
#include "policies/window_score.h"

namespace epikv {
namespace {

const ParamSpec kLaproxParams[] = {
    WindowParam(32),  PoolKernelParam(7),           PoolModeParam("avg"),
    GqaParam("mean"), AllocatorParam("model_pool"), FloorParam(0),
    QueriesParam(),   PseudoTokensParam(),          DraftParam(),
    SlackParam(63),
};

// |v_i W_O[h]|_2 of every token for each query head of the lane, from the Gram matrix of W_O.
// [group, n]
at::Tensor ProjectedNorms(Lane& lane) {
  const at::Tensor& v = lane.values();  // [n, value_width]
  return at::matmul(v, lane.output_gram()).mul_(v).sum(-1).clamp_min_(0).sqrt_();
}

// What a token adds to the residual stream, as the window sees it: |A[:, i]|_2 |v_i W_O[h]|_2.
class LaProx final : public ScoredPolicy {
 public:
  explicit LaProx(const Params& params)
      : ScoredPolicy(Recipe::Of(params, Granularity::kHead)), params_(params) {}

  Eviction Draft(const EvictionTask& task) const override { return DraftOf(task, params_); }

 private:
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    const at::Tensor seen = lane.window_attention().norm(2, 1);  // [group, n]
    return ScoreBeforeWindow(lane, seen * ProjectedNorms(lane), params_);
  }

  // Scores of each layer sum to 1, so that layers can be compared; tokens of the window have none.
  void Reconcile(const EvictionTask& task, std::vector<at::Tensor>& scores) const override {
    const int64_t heads = task.cache.num_kv_heads();
    for (size_t first = 0; first < scores.size(); first += heads) {
      at::Tensor sum = at::zeros({});
      for (int64_t head = 0; head < heads; ++head) {
        if (!scores[first + head].defined()) continue;
        Lane lane(task.cache, static_cast<int64_t>(first) / heads, head);
        sum += BeforeWindow(lane, scores[first + head]).sum();
      }
      for (int64_t head = 0; head < heads; ++head) {
        at::Tensor& score = scores[first + head];
        if (score.defined()) score = score / sum.clamp_min(1e-30);
      }
    }
  }

  const Params params_;
};

}  // namespace

extern constinit const PolicySpec kLaprox{
    .name = "laprox",
    .summary =
        "drops the tokens whose values, through the output projection and the newest "
        "queries' attention, add least to the residual stream; lanes share one budget",
    .paper = "arXiv 2605.07234 (LaProx)",
    .evidence = "cases: laprox_test.cc",
    .params = kLaproxParams,
    .scores = true,
    .complete =
        [](Params& params, const ModelShape&) {
          absl::Status status = CheckWindow(params);
          status.Update(CheckRecipe(params, {ScoreKind::kMass, Comparable::kModel}));
          return status;
        },
    .traits =
        [](const Params& params, const ModelShape&) {
          PolicyTraits traits = WindowTraits(params, Signal::kValues | Signal::kOutputProjection);
          AddLookahead(params, traits);
          return traits;
        },
    .lane_budgets = &RecipeLaneBudgets,
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<LaProx>(params);
    },
};

}  // namespace epikv
