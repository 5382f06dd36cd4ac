#include <algorithm>
#include <utility>

#include "policies/scored_policy.h"

namespace epikv {
namespace {

const ParamSpec kOracleParams[] = {
    {.name = "prefer",
     .type = ParamType::kIntList,
     .fallback = std::vector<int64_t>{},
     .max = INT32_MAX,
     .help = "indexes of the tokens to keep, in any order"},
    SlackParam(0),
};

class Oracle final : public ScoredPolicy {
 public:
  explicit Oracle(std::vector<int64_t> prefer)
      : ScoredPolicy(Granularity::kToken), prefer_(std::move(prefer)) {
    std::sort(prefer_.begin(), prefer_.end());
  }

 private:
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    const absl::Span<const int32_t> index = task.cache.index(0, 0);
    std::vector<float> score(index.size());
    for (size_t slot = 0; slot < score.size(); ++slot) {
      score[slot] = std::binary_search(prefer_.begin(), prefer_.end(), index[slot]) ? 1 : 0;
    }
    return Scores(score);
  }

  std::vector<int64_t> prefer_;  // ascending
};

}  // namespace

extern constinit const PolicySpec kOracle{
    .name = "oracle",
    .summary = "drops tokens outside a given list first, oldest first",
    .evidence = "cases: golden/scenarios.txt",
    .params = kOracleParams,
    .evaluation_only = true,
    .scores = true,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.prompt = PromptEviction::kByChunk, .slack = params.Int("slack")};
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Oracle>(params.IntList("prefer"));
    },
};

}  // namespace epikv
