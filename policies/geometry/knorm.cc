#include <ATen/ATen.h>

#include "policies/scored_policy.h"

namespace epikv {
namespace {

const ParamSpec kKnormParams[] = {SlackParam(32)};

// Published for prompts only; here decoded tokens are ranked too, in batch rounds, since every
// round reads the keys of the whole lane. RoPE turns keys without changing their norm.
class Knorm final : public ScoredPolicy {
 public:
  Knorm() : ScoredPolicy(Granularity::kHead) {}

 private:
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    return -lane.keys().norm(2, -1);
  }
};

}  // namespace

extern constinit const PolicySpec kKnorm{
    .name = "knorm",
    .summary = "drops the tokens with the largest keys, per layer and head",
    .paper = "arXiv 2406.11430 (L2 norm of keys)",
    .evidence = "golden: kvpress 0.5.5 `KnormPress`",
    .params = kKnormParams,
    .scores = true,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.granularity = Granularity::kHead,
                              .signals = Signal::kKeys,
                              .prompt = PromptEviction::kByChunk,
                              .slack = params.Int("slack")};
        },
    .make = [](const Params&, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Knorm>();
    },
};

}  // namespace epikv
