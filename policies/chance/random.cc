#include "policies/random.h"

#include "policies/scored_policy.h"

namespace epikv {
namespace {

const ParamSpec kParams[] = {
    {.name = "frozen",
     .type = ParamType::kBool,
     .fallback = false,
     .help = "one draw per token at birth (a uniform sample of all tokens) instead of a fresh one "
             "at every eviction (survival decays with age)"},
    SlackParam(0),
};

struct RandomState final : PolicyState {
  explicit RandomState(uint64_t seed) : seed(seed) {}
  std::unique_ptr<PolicyState> Clone() const override {
    return std::make_unique<RandomState>(*this);
  }
  const uint64_t seed;
};

class Random final : public ScoredPolicy {
 public:
  explicit Random(bool frozen) : ScoredPolicy(Granularity::kToken), frozen_(frozen) {}

  std::unique_ptr<PolicyState> NewState(const SequenceInfo& info) const override {
    return std::make_unique<RandomState>(info.seed);
  }

 private:
  // Lowest of independent draws: each unprotected token is as likely to go as any other.
  std::vector<float> Score(const EvictionTask& task, int64_t layer, int64_t head) const override {
    const uint64_t round = frozen_ ? 0 : task.cache.newest() + 1;
    const CounterRng rng(static_cast<const RandomState*>(task.state)->seed, round);
    const absl::Span<const int32_t> index = task.cache.index(layer, head);
    std::vector<float> score(index.size());
    for (size_t slot = 0; slot < score.size(); ++slot) {
      score[slot] = static_cast<float>(rng.Uniform(index[slot]));
    }
    return score;
  }

  const bool frozen_;
};

}  // namespace

extern constinit const PolicySpec kRandom{
    .name = "random",
    .summary = "drops tokens drawn uniformly among the unprotected ones",
    .paper = "arXiv 2609.03430 (\"Random Attention\"): the control of every comparison",
    .params = kParams,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.prompt = PromptEviction::kByChunk, .slack = params.Int("slack")};
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Random>(params.Bool("frozen"));
    },
};

}  // namespace epikv
