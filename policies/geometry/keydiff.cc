#include <ATen/ATen.h>

#include "policies/scored_policy.h"

namespace epikv {
namespace {

const ParamSpec kKeydiffParams[] = {SlackParam(127)};

// The mean direction stands for all pairs: a key's cosine to it is, up to a factor that all share,
// the mean of its cosines to every cached key.
class Keydiff final : public ScoredPolicy {
 public:
  Keydiff() : ScoredPolicy(Granularity::kHead) {}

 private:
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    const at::Tensor& keys = lane.keys();
    const at::Tensor direction = keys / keys.norm(2, -1, /*keepdim=*/true).clamp_min(1e-12);
    return -at::cosine_similarity(keys, direction.mean(0, /*keepdim=*/true), -1);
  }
};

}  // namespace

extern constinit const PolicySpec kKeydiff{
    .name = "keydiff",
    .summary = "drops the tokens whose keys point most nearly where the others do",
    .paper = "arXiv 2504.15364 (KeyDiff)",
    .evidence = "golden: kvpress 0.5.5 `KeyDiffPress`",
    .params = kKeydiffParams,
    .scores = true,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.granularity = Granularity::kHead,
                              .signals = Signal::kKeys,
                              .prompt = PromptEviction::kByChunk,
                              .slack = params.Int("slack"),
                              .published = {.prompt = false, .recent = 1}};
        },
    .make = [](const Params&, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Keydiff>();
    },
};

}  // namespace epikv
