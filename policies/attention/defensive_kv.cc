#include <ATen/ATen.h>

#include <limits>

#include "policies/recipe.h"
#include "policies/scored_policy.h"
#include "policies/window_score.h"

namespace epikv {
namespace {

const ParamSpec kDefensiveKvParams[] = {
    WindowParam(32),  PoolKernelParam(5), DecorateParam(),
    AllocatorParam(), FloorParam(),       SlackParam(63),
};

// SnapKV with the worst case of the window's queries and of the group for their mean, and no token
// below the mean of those.
class DefensiveKv final : public ScoredPolicy {
 public:
  explicit DefensiveKv(const Params& params)
      : ScoredPolicy(Recipe::Of(params, Granularity::kHead)), kernel_(params.Int("kernel")) {}

 private:
  at::Tensor Score(const EvictionTask&, Lane& lane) const override {
    const at::Tensor seen = BeforeWindow(lane, lane.window_attention());  // [group, w, before]
    if (seen.size(-1) == 0) return WithWindow(lane, seen[0][0]);
    const at::Tensor flat = seen.flatten(0, 1);
    const at::Tensor pooled = PoolNeighbours(flat, kernel_, "avg");
    // What a query gave in all stays the same; it may have given nothing.
    const at::Tensor share =
        pooled / pooled.sum(-1, /*keepdim=*/true).clamp_min(std::numeric_limits<float>::min());
    const at::Tensor most =
        std::get<0>((share * flat.sum(-1, /*keepdim=*/true)).max(0));  // [before]
    return WithWindow(lane, at::maximum(most, most.mean()));
  }

  const int64_t kernel_;
};

}  // namespace

extern constinit const PolicySpec kDefensiveKv{
    .name = "defensive_kv",
    .summary = "drops the tokens to which no one of the newest queries attends much",
    .paper = "ICLR 2026, DefensiveKV",
    .evidence =
        "golden: FFY0/DefensiveKV 9251b95 `EfficientDefensiveKVPress` (without the weight "
        "by values)",
    .params = kDefensiveKvParams,
    .scores = true,
    .complete =
        [](Params& params, const ModelShape&) {
          absl::Status status = CheckWindow(params);
          status.Update(CheckRecipe(params, {ScoreKind::kMass, Comparable::kModel}));
          return status;
        },
    .traits = [](const Params& params, const ModelShape&) { return WindowTraits(params); },
    .lane_budgets = &RecipeLaneBudgets,
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<DefensiveKv>(params);
    },
};

}  // namespace epikv
