#include <algorithm>
#include <cmath>

#include "policies/head_profile.h"
#include "policies/scored_policy.h"
#include "policies/window_score.h"

namespace epikv {
namespace {

const ParamSpec kHeadkvParams[] = {
    WindowParam(32),
    PoolKernelParam(7),
    PoolModeParam("max"),
    GqaParam("mean"),
    {.name = "beta",
     .type = ParamType::kFloat,
     .fallback = 2.0,
     .min = 1,
     .max = 1000,
     .help =
         "1 / beta of what heads have beside the window is shared out by their scores; the rest "
         "alike"},
    {.name = "power",
     .type = ParamType::kFloat,
     .fallback = 1.0,
     .max = 8,
     .help = "of the scores, before budgets are in proportion to them; 0: all heads alike"},
    SlackParam(63),
};

// As snapkv, with a budget for each head by what it was measured to do.
class HeadKv final : public ScoredPolicy {
 public:
  explicit HeadKv(const Params& params) : ScoredPolicy(Granularity::kHead), params_(params) {}

 private:
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    return WindowScore(lane, lane.window_attention(), params_);
  }

  const Params params_;
};

std::vector<int64_t> HeadkvBudgets(const Params& params, const ModelShape& shape, int64_t budget) {
  const HeadProfile* profile = FindHeadProfile("headkv", shape);
  if (profile == nullptr) {
    return std::vector<int64_t>(shape.num_layers * shape.num_kv_heads, budget);
  }
  std::vector<double> weights;
  for (const double score : profile->scores) {
    weights.push_back(std::pow(score, params.Float("power")));
  }
  const int64_t window = std::min(params.Int("window"), budget);
  const double shared = std::floor(static_cast<double>(budget - window) / params.Float("beta"));
  return BudgetsByWeight(weights, budget - static_cast<int64_t>(shared), budget);
}

}  // namespace

extern constinit const PolicySpec kHeadkv{
    .name = "headkv",
    .summary =
        "drops the tokens to which the newest queries attend least; heads that look up far back "
        "what the model says next have larger budgets",
    .paper = "arXiv 2410.19258 (HeadKV)",
    .evidence = "golden: FYYFU/HeadKV 0862a09 `ReasonSnapKVCluster`",
    .params = kHeadkvParams,
    .scores = true,
    .read_data = &ReadHeadProfile,
    .complete = [](Params& params, const ModelShape&) { return CheckWindow(params); },
    .traits = [](const Params& params, const ModelShape&) { return WindowTraits(params); },
    .lane_budgets = &HeadkvBudgets,
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<HeadKv>(params);
    },
};

}  // namespace epikv
