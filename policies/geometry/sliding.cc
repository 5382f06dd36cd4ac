#include <ATen/ATen.h>

#include "policies/scored_policy.h"

namespace epikv {
namespace {

const ParamSpec kSlidingParams[] = {SlackParam(0)};

class Sliding final : public ScoredPolicy {
 public:
  Sliding() : ScoredPolicy(Granularity::kToken) {}

 private:
  // All alike: among equals the older goes.
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    return at::zeros(static_cast<int64_t>(task.cache.index(0, 0).size()));
  }
};

}  // namespace

extern constinit const PolicySpec kSliding{
    .name = "sliding",
    .summary = "drops the oldest tokens",
    .paper =
        "arXiv 2309.17453, \"window attention\"; with sinks = 4: StreamingLLM at true positions",
    .evidence = "cases: golden/scenarios.txt",
    .params = kSlidingParams,
    .scores = true,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.prompt = PromptEviction::kByChunk, .slack = params.Int("slack")};
        },
    .make = [](const Params&, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Sliding>();
    },
};

}  // namespace epikv
