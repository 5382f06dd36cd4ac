#include <vector>

#include "policies/random.h"
#include "policies/scored_policy.h"

namespace epikv {
namespace {

const ParamSpec kRandomAttentionParams[] = {SlackParam(63)};

class RandomAttention final : public ScoredPolicy {
 public:
  RandomAttention() : ScoredPolicy(Granularity::kHead) {}

 private:
  // Lowest of independent draws, fresh in every lane and round.
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    const CacheView& cache = task.cache;
    const CounterRng rng(cache.seed(), RoundStream(cache, lane.layer(), lane.head()));
    const absl::Span<const int32_t> index = cache.index(lane.layer(), lane.head());
    std::vector<float> score(index.size());
    for (size_t slot = 0; slot < score.size(); ++slot) {
      score[slot] = static_cast<float>(rng.Uniform(index[slot]));
    }
    return Scores(score);
  }
};

}  // namespace

extern constinit const PolicySpec kRandomAttention{
    .name = "random_attention",
    .summary = "drops decoded tokens at random, each head and layer by draws of its own",
    .paper = "arXiv 2609.03430 (Random Attention)",
    .evidence = "cases: random_policy_test.cc",
    .params = kRandomAttentionParams,
    .scores = true,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.granularity = Granularity::kHead,
                              .prompt = PromptEviction::kByChunk,
                              .slack = params.Int("slack"),
                              .published = {.recent = 64}};
        },
    .make = [](const Params&, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<RandomAttention>();
    },
};

}  // namespace epikv
