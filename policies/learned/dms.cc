#include <utility>

#include "policies/gated_policy.h"
#include "policies/mlp_gate.h"
#include "policies/policy.h"
#include "policies/recipe.h"

// Dynamic Memory Sparsification. When a token's successor is born, a gate at each layer's attention
// input says for each KV head whether the token may go; it goes once it has left the recent window.

namespace epikv {
namespace {

const ParamSpec kDmsParams[] = {CadenceParam(), SlackParam(63)};

class Dms final : public GatedPolicy {
 public:
  explicit Dms(std::shared_ptr<const MlpGate> gate)
      : GatedPolicy({.granularity = Granularity::kHead, .threshold = 0, .all_lanes = true},
                    std::move(gate), /*delay=*/1) {}

 private:
  // Above 0 the gate lets a token go. Beyond the budget those go first that it let go most surely.
  at::Tensor Score(const EvictionTask&, Lane& lane) const override {
    return lane.column(kSaid).neg();
  }
};

absl::StatusOr<std::shared_ptr<const PolicyData>> ReadDmsGate(const ArtefactData& artefact,
                                                              const ModelShape& shape) {
  auto maps = MlpGate::Read(artefact.arrays, shape, 1);
  if (!maps.ok()) return maps.status();
  return std::make_shared<MlpGate>(*std::move(maps), Activation::kSilu);
}

}  // namespace

extern constinit const PolicySpec kDms{
    .name = "dms",
    .summary =
        "drops the tokens that a gate, trained on the model, let go when the token after them came",
    .paper = "arXiv 2506.05345 (Dynamic Memory Sparsification)",
    .evidence = "cases: dms_test.cc",
    .params = kDmsParams,
    .scores = true,
    .read_data = &ReadDmsGate,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.granularity = Granularity::kHead,
                              .signals = Signal::kGate,
                              .columns = {"gate"},
                              .prompt = PromptEviction::kByChunk,
                              .slack = params.Int("slack"),
                              .rounds_every = params.Int("cadence"),
                              .published = {.prompt = false, .recent = 512}};
        },
    .make = [](const Params&, const ModelShape& shape) -> std::shared_ptr<const Policy> {
      return std::make_shared<Dms>(
          std::static_pointer_cast<const MlpGate>(shape.artefacts.at("dms")));
    },
};

}  // namespace epikv
