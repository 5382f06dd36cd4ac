#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "policies/attention_row.h"
#include "policies/scored_policy.h"

namespace epikv {
namespace {

const ParamSpec kRaasParams[] = {SlackParam(0)};

// Column `stamp`: the last decode step, counted from 1, in which a decoded token was among the more
// attended half of them; at first that of its birth. Prompt tokens have none.
class Raas final : public ScoredPolicy {
 public:
  Raas() : ScoredPolicy(Granularity::kToken) {}

  void Observe(absl::Span<SequenceStep> steps) const override {
    for (SequenceStep& step : steps) {
      if (step.phase == Phase::kDecode) Stamp(*step.signals.attention, step.cache);
    }
  }

 private:
  static void Stamp(const Signals::AttentionRow& attention, CacheView& cache) {
    const absl::Span<float> stamp = cache.column(0, 0, 0);
    const absl::Span<const int32_t> index = cache.index(0, 0);
    const std::vector<float> mean = MeanAttention(attention, cache);
    std::vector<float> decoded;
    for (size_t slot = 0; slot < mean.size(); ++slot) {
      if (index[slot] >= cache.prompt_tokens() && !std::isnan(mean[slot])) {
        decoded.push_back(mean[slot]);
      }
    }
    if (decoded.empty()) decoded.push_back(0);  // none is a number
    const auto middle = decoded.begin() + (std::ssize(decoded) - 1) / 2;
    std::nth_element(decoded.begin(), middle, decoded.end());
    const float now = static_cast<float>(cache.newest() + 1 - cache.prompt_tokens());
    for (size_t slot = 0; slot < mean.size(); ++slot) {
      if (index[slot] < cache.prompt_tokens()) continue;
      if (mean[slot] >= *middle || index[slot] == cache.newest()) stamp[slot] = now;
      if (std::isnan(mean[slot])) stamp[slot] = mean[slot];
    }
  }

  at::Tensor Score(const EvictionTask& task, Lane&) const override {
    const absl::Span<const float> stamp = task.cache.column(0, 0, 0);
    return Scores({stamp.begin(), stamp.end()});
  }
};

}  // namespace

extern constinit const PolicySpec kRaas{
    .name = "raas",
    .summary = "drops the decoded tokens that were longest not among the more attended half",
    .paper = "arXiv 2502.11147, by token",
    .evidence = "golden: stevenkolawole/epiphany-kv-cache d424208 `RaaSEviction`",
    .params = kRaasParams,
    .scores = true,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.averages_heads = true,
                              .signals = Signal::kAttentionRow,
                              .columns = {"stamp"},
                              .slack = params.Int("slack"),
                              .published = {.recent = 1}};
        },
    .make = [](const Params&, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Raas>();
    },
};

}  // namespace epikv
