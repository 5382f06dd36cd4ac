#include <ATen/ATen.h>

#include "policies/scored_policy.h"

namespace epikv {
namespace {

const ParamSpec kParams[] = {SlackParam(0)};

class Tova final : public ScoredPolicy {
 public:
  Tova() : ScoredPolicy(Granularity::kLayer) {}

 private:
  // What the newest query gave each token, averaged over all query heads of the layer.
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    at::Tensor sum = lane.window_attention().sum({0, 1});  // [n]
    for (int64_t head = 1; head < task.cache.num_kv_heads(); ++head) {
      sum += Lane(task.cache, lane.layer(), head).window_attention().sum({0, 1});
    }
    return sum / task.cache.num_heads();
  }
};

}  // namespace

extern constinit const PolicySpec kTova{
    .name = "tova",
    .summary = "drops the tokens to which the newest query attends least, per layer",
    .paper = "arXiv 2401.06104",
    .evidence = "golden: kvpress 0.5.5 `TOVAPress`",
    .params = kParams,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.granularity = Granularity::kLayer,
                              .signals = Signal::kKeys | Signal::kQueries,
                              .window = 1,
                              .prompt = PromptEviction::kAtEnd,
                              .slack = params.Int("slack"),
                              .published = {.prompt = false, .recent = 1}};
        },
    .make = [](const Params&, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Tova>();
    },
};

}  // namespace epikv
