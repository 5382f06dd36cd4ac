#include "policies/random.h"

#include <vector>

#include "policies/scored_policy.h"

namespace epikv {
namespace {

const ParamSpec kRandomParams[] = {
    {.name = "frozen",
     .type = ParamType::kBool,
     .fallback = false,
     .help = "one draw per token at birth (a uniform sample of all tokens) instead of a fresh one "
             "at every eviction (survival decays with age)"},
    SlackParam(0),
};

class Random final : public ScoredPolicy {
 public:
  explicit Random(bool frozen) : ScoredPolicy(Granularity::kToken), frozen_(frozen) {}

 private:
  // Lowest of independent draws: each unprotected token is as likely to go as any other.
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    const uint64_t round = frozen_ ? 0 : task.cache.newest() + 1;
    const CounterRng rng(task.cache.seed(), round);
    const absl::Span<const int32_t> index = task.cache.index(0, 0);
    std::vector<float> score(index.size());
    for (size_t slot = 0; slot < score.size(); ++slot) {
      score[slot] = static_cast<float>(rng.Uniform(index[slot]));
    }
    return Scores(score);
  }

  const bool frozen_;
};

}  // namespace

extern constinit const PolicySpec kRandom{
    .name = "random",
    .summary = "drops tokens drawn uniformly among the unprotected ones",
    .paper = "arXiv 2609.03430 (\"Random Attention\"): the control of every comparison",
    .evidence = "cases: random_policy_test.cc",
    .params = kRandomParams,
    .scores = true,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.prompt = PromptEviction::kByChunk, .slack = params.Int("slack")};
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Random>(params.Bool("frozen"));
    },
};

}  // namespace epikv
