#include <ATen/ATen.h>

#include "policies/scored_policy.h"

namespace epikv {
namespace {

const ParamSpec kParams[] = {SlackParam(32)};

// Published for prompts only; here decoded tokens are ranked too, in batch rounds, since every
// round reads the keys of the whole lane. RoPE turns keys without changing their norm.
class Knorm final : public ScoredPolicy {
 public:
  Knorm() : ScoredPolicy(Granularity::kHead) {}

 private:
  std::vector<float> Score(const EvictionTask& task, int64_t layer, int64_t head) const override {
    const at::Tensor norm =
        task.cache.keys(layer, head).to(at::kFloat).norm(2, -1).cpu().contiguous();  // [used]
    std::vector<float> score(norm.numel());
    const float* value = norm.const_data_ptr<float>();
    for (size_t slot = 0; slot < score.size(); ++slot) score[slot] = -value[slot];
    return score;
  }
};

}  // namespace

extern constinit const PolicySpec kKnorm{
    .name = "knorm",
    .summary = "drops the tokens with the largest keys, per layer and head",
    .paper = "arXiv 2406.11430 (L2 norm of keys)",
    .params = kParams,
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
