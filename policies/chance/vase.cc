#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "policies/scored_policy.h"
#include "policies/select.h"
#include "policies/window_score.h"

namespace epikv {
namespace {

constexpr int64_t kVaseSinks = 4;      // count as the largest
constexpr float kAboveAllDraws = 100;  // a drawn score of a mass <= 1 is below 38

constexpr absl::string_view kMeasures[] = {"range", "var", "l2"};

const ParamSpec kVaseParams[] = {
    WindowParam(64),
    PoolKernelParam(5),
    {.name = "large",
     .type = ParamType::kFloat,
     .fallback = 0.25,
     .max = 1,
     .help = "share of the budget for the tokens with the largest values"},
    {.name = "measure",
     .type = ParamType::kChoice,
     .fallback = std::string("range"),
     .choices = kMeasures,
     .help = "of a value: largest channel minus smallest, variance over channels, norm"},
    SlackParam(63),
};

// Behind the window, the tokens with the largest values stay, the first four cached with them; of
// the others, tokens drawn without replacement with probability proportional to what the window's
// queries give them.
class Vase final : public ScoredPolicy {
 public:
  explicit Vase(const Params& params)
      : ScoredPolicy(Granularity::kHead),
        kernel_(params.Int("kernel")),
        large_(params.Float("large")),
        measure_(params.Choice("measure")) {}

 private:
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    const CacheView& cache = task.cache;
    const int64_t n = lane.index().numel(), before = n - lane.window_tokens();
    at::Tensor score = at::full(n, kAboveAllDraws + n);  // in birth order
    if (before == 0) return score;

    const at::Tensor candidates = lane.by_birth().narrow(0, 0, before);
    const at::Tensor size = Measure(lane.values().index_select(0, candidates));
    at::Tensor order = size.clone();
    order.slice(0, 0, kVaseSinks) = std::numeric_limits<float>::infinity();
    const int64_t budget = n - cache.excess(lane.layer(), lane.head());
    const int64_t large = std::min(before, static_cast<int64_t>(large_ * budget));
    // Of equals the newer is larger.
    const at::Tensor largest =
        order.argsort(/*stable=*/true, 0, /*descending=*/false).narrow(0, before - large, large);

    at::Tensor part = score.narrow(0, 0, before);
    part.copy_(Draw(lane, candidates));
    part.index_copy_(0, largest, kAboveAllDraws + at::arange(large, at::kFloat));
    part.add_(0 * size);  // an order hides that a number is none; 0 x NaN does not
    return lane.ToSlots(score);
  }

  at::Tensor Measure(const at::Tensor& values) const {
    if (measure_ == "var") return values.var(-1);
    if (measure_ == "l2") return values.norm(2, -1);
    return values.amax(-1) - values.amin(-1);
  }

  at::Tensor Draw(Lane& lane, const at::Tensor& candidates) const {
    // The window's tokens have no part in the softmax.
    const int64_t before = candidates.numel(), n = lane.index().numel();
    const at::Tensor attention = SoftmaxOfSeen(
        lane.window_logits().index_fill(-1, lane.by_birth().narrow(0, before, n - before),
                                        -std::numeric_limits<float>::infinity()));
    const at::Tensor seen = attention.mean(1).index_select(-1, candidates);  // [group, before]
    const at::Tensor mass = PoolNeighbours(seen, kernel_, "avg").mean(0).contiguous();
    const at::Tensor index = lane.index().index_select(0, candidates).to(at::kInt);
    const CacheView& cache = lane.cache();
    return Scores(DrawnScores({mass.const_data_ptr<float>(), static_cast<size_t>(mass.numel())},
                              {index.const_data_ptr<int32_t>(), static_cast<size_t>(index.numel())},
                              cache.seed(), RoundStream(cache, lane.layer(), lane.head())));
  }

  const int64_t kernel_;
  const double large_;
  const std::string measure_;
};

}  // namespace

extern constinit const PolicySpec kVase{
    .name = "vase",
    .summary =
        "keeps the tokens with the widest values, and of the others some at random, as the "
        "newest queries attend",
    .paper = "arXiv 2606.03928 (VaSE)",
    .evidence =
        "golden: terarachang/VaSE bfa2692 `EvictLayer` (its chance replaced by ours); "
        "random_policy_test.cc",
    .params = kVaseParams,
    .scores = true,
    .complete = [](Params& params, const ModelShape&) { return CheckWindow(params); },
    .traits =
        [](const Params& params, const ModelShape&) {
          PolicyTraits traits = WindowTraits(params, Signal::kValues);
          traits.published.prompt = false;
          traits.published.sinks = kVaseSinks;
          return traits;
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Vase>(params);
    },
};

}  // namespace epikv
