#include "policies/scored_policy.h"

namespace epikv {
namespace {

const ParamSpec kParams[] = {SlackParam(0)};

class Sliding final : public ScoredPolicy {
 public:
  Sliding() : ScoredPolicy(Granularity::kToken) {}

 private:
  // All alike: among equals the older goes.
  std::vector<float> Score(const EvictionTask& task, int64_t layer, int64_t head) const override {
    return std::vector<float>(task.cache.index(layer, head).size());
  }
};

}  // namespace

extern constinit const PolicySpec kSliding{
    .name = "sliding",
    .summary = "drops the oldest tokens",
    .paper =
        "arXiv 2309.17453, \"window attention\"; with sinks = 4: StreamingLLM at true positions",
    .params = kParams,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.prompt = PromptEviction::kByChunk, .slack = params.Int("slack")};
        },
    .make = [](const Params&, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Sliding>();
    },
};

}  // namespace epikv
