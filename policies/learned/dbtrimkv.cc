#include "policies/policy.h"
#include "policies/recipe.h"
#include "policies/retention.h"

// DBTrimKV. TRIM-KV's gates with a last map that all layers share, so that their numbers compare:
// all lanes share one budget.

namespace epikv {
namespace {

const ParamSpec kDbtrimkvParams[] = {LookaheadParam(), AllocatorParam("model_pool"),
                                     FloorParam(/*fallback=*/0), SlackParam(127)};

}  // namespace

extern constinit const PolicySpec kDbtrimkv{
    .name = "dbtrimkv",
    .summary =
        "drops the tokens of which a gate, trained on the model, said at their birth that their "
        "head will have forgotten most of them by now; lanes share one budget",
    .paper = "arXiv 2605.09649 (Make Each Token Count)",
    .evidence = "golden: ngocbh/trimkv 0456bc4 `DynamicBudgetTrimKVCache`",
    .params = kDbtrimkvParams,
    .scores = true,
    .read_data = [](const ArtefactData& artefact,
                    const ModelShape& shape) { return ReadRetentionGate(artefact, shape, 3); },
    .complete =
        [](Params& params, const ModelShape&) {
          return CheckRecipe(params, {.kind = ScoreKind::kValue, .comparable = Comparable::kModel});
        },
    .traits =
        [](const Params& params, const ModelShape&) {
          PolicyTraits traits = RetentionTraits(params);
          AddRecipe(params, traits);
          return traits;
        },
    .lane_budgets = &RecipeLaneBudgets,
    .make = [](const Params& params, const ModelShape& shape) -> std::shared_ptr<const Policy> {
      return MakeRetentionPolicy(params, Recipe::Of(params, Granularity::kHead),
                                 shape.artefacts.at("dbtrimkv"));
    },
};

}  // namespace epikv
