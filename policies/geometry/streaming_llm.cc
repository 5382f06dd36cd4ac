#include <ATen/ATen.h>

#include "policies/scored_policy.h"

namespace epikv {
namespace {

const ParamSpec kStreamingLlmParams[] = {SlackParam(0)};

// `sliding` behind four sinks, which are protection.
class StreamingLlm final : public ScoredPolicy {
 public:
  StreamingLlm() : ScoredPolicy(Granularity::kToken) {}

 private:
  // All alike: among equals the older goes.
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    return at::zeros(static_cast<int64_t>(task.cache.index(0, 0).size()));
  }
};

}  // namespace

extern constinit const PolicySpec kStreamingLlm{
    .name = "streaming_llm",
    .summary = "drops the oldest tokens behind four sinks",
    .paper = "arXiv 2309.17453 (StreamingLLM)",
    .evidence = "golden: mit-han-lab/streaming-llm 2e50426 `StartRecentKVCache`",
    .params = kStreamingLlmParams,
    .scores = true,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.prompt = PromptEviction::kByChunk,
                              .slack = params.Int("slack"),
                              .published = {.prompt = false, .sinks = 4, .recent = 1}};
        },
    .make = [](const Params&, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<StreamingLlm>();
    },
};

}  // namespace epikv
