#include <utility>

#include "policies/gated_policy.h"
#include "policies/mlp_gate.h"
#include "policies/policy.h"
#include "policies/recipe.h"

// KVzap. A gate at each layer's attention input foretells what KVzip+ would find: the log of the
// most that any query will take of a token into the residual stream, as a share of what is there.

namespace epikv {
namespace {

constexpr absl::string_view kSelectors[] = {"top_k", "threshold"};

const ParamSpec kKvzapParams[] = {
    AllocatorParam("model_pool"),
    FloorParam(/*fallback=*/0),
    {.name = "select",
     .type = ParamType::kChoice,
     .fallback = std::string("top_k"),
     .choices = kSelectors,
     .help = "top_k: the best stay; threshold: as top_k, and every `cadence` tokens all that score "
             "below `threshold` go, though the budget has room"},
    ThresholdParam(),
    CadenceParam(),
    SlackParam(63),
};

class Kvzap final : public GatedPolicy {
 public:
  Kvzap(Recipe recipe, std::shared_ptr<const MlpGate> gate)
      : GatedPolicy(std::move(recipe), std::move(gate)) {}

 private:
  at::Tensor Score(const EvictionTask&, Lane& lane) const override { return lane.column(kSaid); }
};

// A ridge regression has one map, a network two.
absl::StatusOr<std::shared_ptr<const PolicyData>> ReadKvzapGate(const ArtefactData& artefact,
                                                                const ModelShape& shape) {
  const int64_t depth = artefact.arrays.contains("layers.0.linear2.weight") ? 2 : 1;
  auto maps = MlpGate::Read(artefact.arrays, shape, depth);
  if (!maps.ok()) return maps.status();
  return std::make_shared<MlpGate>(*std::move(maps), Activation::kGelu);
}

PolicyTraits KvzapTraits(const Params& params, const ModelShape&) {
  PolicyTraits traits{
      .granularity = Granularity::kHead,
      .signals = Signal::kGate,
      .columns = {"gate"},
      .prompt = PromptEviction::kByChunk,
      .slack = params.Int("slack"),
      .rounds_every = params.Choice("select") == "threshold" ? params.Int("cadence") : 0,
      .published = {.prompt = false, .recent = 128}};
  AddRecipe(params, traits);
  return traits;
}

}  // namespace

extern constinit const PolicySpec kKvzap{
    .name = "kvzap",
    .summary =
        "drops the tokens of which a gate, fitted to the model, said at their birth that no query "
        "will take much of them",
    .paper = "arXiv 2601.07891 (KVzap)",
    .evidence = "golden: kvpress 0.5.5 `KVzapPress`",
    .params = kKvzapParams,
    .scores = true,
    .read_data = &ReadKvzapGate,
    .complete =
        [](Params& params, const ModelShape&) {
          return CheckRecipe(params, {.kind = ScoreKind::kValue, .comparable = Comparable::kModel});
        },
    .traits = &KvzapTraits,
    .lane_budgets = &RecipeLaneBudgets,
    .make = [](const Params& params, const ModelShape& shape) -> std::shared_ptr<const Policy> {
      Recipe recipe = Recipe::Of(params, Granularity::kHead);
      recipe.all_lanes = KvzapTraits(params, shape).rounds_every > 0;
      return std::make_shared<Kvzap>(
          std::move(recipe), std::static_pointer_cast<const MlpGate>(shape.artefacts.at("kvzap")));
    },
};

}  // namespace epikv
