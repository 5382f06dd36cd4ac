#include "tests/ragged_policy.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "policies/policy.h"
#include "policies/random.h"
#include "policies/select.h"

namespace epikv {
namespace {

const ParamSpec kParams[] = {
    {.name = "spread",
     .type = ParamType::kFloat,
     .fallback = 0.5,
     .max = 1,
     .help = "capacities go from budget x (1 - spread) to budget x (1 + spread)"},
    SlackParam(0),
};

// A token's mark in a lane: its score there, and never 0.
float Mark(uint64_t lane, int32_t index) {
  return static_cast<float>(0.5 + CounterRng(0, lane).Uniform(index));
}

class Ragged final : public Policy {
 public:
  void Observe(absl::Span<SequenceStep> steps) const override {
    for (SequenceStep& step : steps) {
      CacheView& cache = step.cache;
      for (int64_t layer = 0; layer < cache.num_layers(); ++layer) {
        for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
          const absl::Span<const int32_t> index = cache.index(layer, head);
          const absl::Span<float> mark = cache.column(0, layer, head);
          for (size_t slot = 0; slot < index.size(); ++slot) {
            // A column that was not cleared stays wrong, and Evict finds it.
            if (index[slot] < step.first) continue;
            mark[slot] += Mark(layer * cache.num_kv_heads() + head, index[slot]);
          }
        }
      }
    }
  }

  std::vector<Eviction> Evict(absl::Span<EvictionTask> tasks) const override {
    std::vector<Eviction> evictions;
    for (EvictionTask& task : tasks) evictions.push_back(EvictOne(task.cache));
    return evictions;
  }

 private:
  static absl::Status CheckAligned(CacheView& cache, int64_t layer, int64_t head) {
    const int64_t lane = layer * cache.num_kv_heads() + head;
    const absl::Span<const int32_t> index = cache.index(layer, head);
    const absl::Span<const float> mark = cache.column(0, layer, head);
    for (size_t slot = 0; slot < index.size(); ++slot) {
      if (mark[slot] != Mark(lane, index[slot])) {
        return absl::InternalError(absl::StrCat("layer ", layer, ", head ", head, ", slot ", slot,
                                                ": the column is not token ", index[slot], "'s"));
      }
    }
    for (const at::Tensor& rows : {cache.keys(layer, head), cache.values(layer, head)}) {
      if (rows.dim() != 2 || rows.size(0) != static_cast<int64_t>(index.size())) {
        return absl::InternalError(absl::StrCat("layer ", layer, ", head ", head, ": ",
                                                index.size(), " tokens, but K or V is of shape ",
                                                c10::str(rows.sizes())));
      }
    }
    return absl::OkStatus();
  }

  static Eviction EvictOne(CacheView& cache) {
    Eviction eviction;
    for (int64_t layer = 0; layer < cache.num_layers(); ++layer) {
      for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
        if (absl::Status s = CheckAligned(cache, layer, head); !s.ok()) return {.status = s};
        absl::StatusOr<std::vector<int32_t>> victims =
            LowestScores(cache.column(0, layer, head), cache.index(layer, head), cache.protection(),
                         cache.newest(), cache.excess(layer, head));
        if (!victims.ok()) return {.status = victims.status()};
        eviction.victims.push_back(*std::move(victims));
      }
    }
    return eviction;
  }
};

std::vector<int64_t> LaneBudgets(const Params& params, const ModelShape& shape, int64_t budget) {
  const int64_t lanes = shape.num_layers * shape.num_kv_heads;
  std::vector<int64_t> budgets(lanes, budget);
  for (int64_t lane = 0; lane < lanes; ++lane) {
    // From -1 to 1, and opposite for the lanes that mirror each other, so that the sum stays.
    const double place = lanes == 1 ? 0 : 2.0 * lane / (lanes - 1) - 1;
    budgets[lane] += std::lround(place * params.Float("spread") * budget);
  }
  return budgets;
}

}  // namespace

extern constinit const PolicySpec kRaggedPolicy{
    .name = "ragged",
    .summary = "gives every layer and head another capacity",
    .params = kParams,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.granularity = Granularity::kHead,
                              .signals = Signal::kKeys | Signal::kValues,
                              .columns = {"mark"},
                              .prompt = PromptEviction::kAtEnd,
                              .slack = params.Int("slack")};
        },
    .lane_budgets = &LaneBudgets,
    .make = [](const Params&, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Ragged>();
    },
};

}  // namespace epikv
