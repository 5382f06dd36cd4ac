#include "policies/lookahead.h"
#include "policies/recipe.h"
#include "policies/scored_policy.h"
#include "policies/window_score.h"

namespace epikv {
namespace {

const ParamSpec kSnapkvParams[] = {
    WindowParam(64),  PoolKernelParam(5), PoolModeParam("avg"), GqaParam("mean"),
    DecorateParam(),  AllocatorParam(),   FloorParam(),         SelectParam(),
    ThresholdParam(), QueriesParam(),     PseudoTokensParam(),  DraftParam(),
    SlackParam(63),
};

// Published for prompts; the same score ranks decoded tokens, in rounds of 64 (as in arXiv
// 2606.03928's engine).
class SnapKv final : public ScoredPolicy {
 public:
  explicit SnapKv(const Params& params)
      : ScoredPolicy(Recipe::Of(params, Granularity::kHead)), params_(params) {}

  Eviction Draft(const EvictionTask& task) const override { return DraftOf(task, params_); }

 private:
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    return WindowScore(lane, lane.window_attention(), params_);
  }

  const Params params_;
};

}  // namespace

extern constinit const PolicySpec kSnapkv{
    .name = "snapkv",
    .summary = "drops the tokens to which the newest queries attend least",
    .paper = "arXiv 2404.14469",
    .evidence =
        "golden: kvpress 0.5.5 `SnapKVPress`, kvpress 0.5.5 `CriticalKVPress`, kvpress 0.5.5 "
        "`AdaKVPress`, kvpress 0.5.5 `PyramidKVPress`, guozhiyu/vatp 39ea686 "
        "`LlamaAttention_heavy_hitter`; caote: caote_test.cc",
    .params = kSnapkvParams,
    .scores = true,
    .complete =
        [](Params& params, const ModelShape&) {
          absl::Status status = CheckWindow(params);
          status.Update(CheckRecipe(params, {ScoreKind::kMass, Comparable::kModel}));
          return status;
        },
    .traits =
        [](const Params& params, const ModelShape&) {
          PolicyTraits traits = WindowTraits(params);
          AddLookahead(params, traits);
          return traits;
        },
    .lane_budgets = &RecipeLaneBudgets,
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<SnapKv>(params);
    },
};

}  // namespace epikv
