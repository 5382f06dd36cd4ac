#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "policies/head_profile.h"
#include "policies/scored_policy.h"

namespace epikv {
namespace {

const ParamSpec kDuoAttentionParams[] = {
    {.name = "sparsity",
     .type = ParamType::kFloat,
     .fallback = 0.5,
     .max = 1,
     .help = "share of KV heads that stream, those that look up least far back; never all"},
    {.name = "stream",
     .type = ParamType::kFloat,
     .fallback = 0.5,
     .max = 1,
     .help = "share of the budget that a streaming head has; the others have what that leaves"},
    SlackParam(63),
};

// Streaming heads keep sinks and few recent tokens; what that saves, the others keep.
class DuoAttention final : public ScoredPolicy {
 public:
  DuoAttention() : ScoredPolicy(Granularity::kHead) {}

 private:
  // All alike: among equals the older goes.
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    return at::zeros(static_cast<int64_t>(task.cache.index(lane.layer(), lane.head()).size()));
  }
};

// 0 of heads that stream, 1 of the others.
std::vector<double> Retrieving(const HeadProfile& profile, double sparsity) {
  const int64_t heads = std::ssize(profile.scores);
  std::vector<int64_t> ascending(heads);
  std::iota(ascending.begin(), ascending.end(), 0);
  std::stable_sort(ascending.begin(), ascending.end(),
                   [&](int64_t a, int64_t b) { return profile.scores[a] < profile.scores[b]; });
  const auto streaming =
      std::min<int64_t>(heads - 1, std::llrint(sparsity * static_cast<double>(heads)));
  std::vector<double> retrieving(heads, 1.0);
  for (int64_t i = 0; i < streaming; ++i) retrieving[ascending[i]] = 0;
  return retrieving;
}

std::vector<int64_t> DuoAttentionBudgets(const Params& params, const ModelShape& shape,
                                         int64_t budget) {
  const HeadProfile* profile = FindHeadProfile("duo_attention", shape);
  if (profile == nullptr) {
    return std::vector<int64_t>(shape.num_layers * shape.num_kv_heads, budget);
  }
  const auto streams =
      std::max<int64_t>(1, std::llround(params.Float("stream") * static_cast<double>(budget)));
  return BudgetsByWeight(Retrieving(*profile, params.Float("sparsity")), streams, budget);
}

}  // namespace

extern constinit const PolicySpec kDuoAttention{
    .name = "duo_attention",
    .summary =
        "drops the oldest tokens behind four sinks, and more of them in heads that look up little "
        "far back",
    .paper = "arXiv 2410.10819 (DuoAttention)",
    .evidence = "golden: kvpress 0.5.5 `DuoAttentionPress`",
    .params = kDuoAttentionParams,
    .scores = true,
    .read_data = &ReadHeadProfile,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.granularity = Granularity::kHead,
                              .prompt = PromptEviction::kByChunk,
                              .slack = params.Int("slack"),
                              .published = {.prompt = false, .sinks = 4, .recent = 1}};
        },
    .lane_budgets = &DuoAttentionBudgets,
    .make = [](const Params&, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<DuoAttention>();
    },
};

}  // namespace epikv
