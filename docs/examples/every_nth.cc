#include <cstdint>
#include <vector>

#include "policies/scored_policy.h"

namespace epikv {
namespace {

const ParamSpec kEveryNthParams[] = {
    {.name = "n",
     .type = ParamType::kInt,
     .fallback = int64_t{2},
     .min = 2,
     .max = 1024,
     .help = "of n neighbours one stays; then of n of those one, and so on"},
    SlackParam(0),
};

// Thins the text evenly, whatever it says: a token's score is how often n divides its index. Tokens
// that n does not divide go first, then those that it divides once, and so on; among equals the
// older goes.
class EveryNth final : public ScoredPolicy {
 public:
  explicit EveryNth(const Params& params)
      : ScoredPolicy(Granularity::kToken), n_(params.Int("n")) {}

 private:
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    const absl::Span<const int32_t> index = task.cache.index(0, 0);
    std::vector<float> score(index.size());
    for (size_t slot = 0; slot < score.size(); ++slot) {
      score[slot] = static_cast<float>(TimesDivided(index[slot]));
    }
    return Scores(score);
  }

  // Every n divides 0 for ever: it counts as divided more often than any other index can be.
  int64_t TimesDivided(int64_t index) const {
    if (index == 0) return 31;
    int64_t times = 0;
    for (; index % n_ == 0; index /= n_) ++times;
    return times;
  }

  const int64_t n_;
};

}  // namespace

extern constinit const PolicySpec kEveryNth{
    .name = "every_nth",
    .summary = "drops tokens between every n-th one, then between every n-th of those",
    .paper = "ours: the example of docs/writing-a-policy.md",
    .evidence = "cases: golden/scenarios.txt",
    .params = kEveryNthParams,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.prompt = PromptEviction::kByChunk, .slack = params.Int("slack")};
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<EveryNth>(params);
    },
};

}  // namespace epikv
