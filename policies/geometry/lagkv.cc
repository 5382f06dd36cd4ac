#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "policies/loops.h"
#include "policies/scored_policy.h"

namespace epikv {
namespace {

constexpr int64_t kLagkvSinks = 4;  // tokens before the first partition

const ParamSpec kLagkvParams[] = {
    {.name = "lag",
     .type = ParamType::kInt,
     .fallback = int64_t{128},
     .min = 2,
     .max = 65536,
     .help = "tokens of a partition"},
    {.name = "cross_scoring",
     .type = ParamType::kBool,
     .fallback = false,
     .help = "compares scores across partitions instead of ranks inside each"},
    SlackParam(127),
};

// Places in ascending order along the last dimension; of equals the newer is higher. x: [n, lag]
at::Tensor Ranks(const at::Tensor& x) {
  const at::Tensor ascending = x.argsort(/*stable=*/true, -1, /*descending=*/false);
  return at::empty_like(ascending).scatter_(-1, ascending,
                                            at::arange(x.size(-1), at::kLong).expand_as(ascending));
}

// Partitions are of what is cached, in birth order, anew in each round. The newest whole partition
// and what follows it have nothing to be compared with, and rank above all others.
class LagKvPolicy final : public ScoredPolicy {
 public:
  explicit LagKvPolicy(const Params& params)
      : ScoredPolicy(Granularity::kHead),
        lag_(params.Int("lag")),
        cross_scoring_(params.Bool("cross_scoring")) {}

 private:
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    const int64_t n = lane.index().numel();
    at::Tensor score = at::ones(n);  // in birth order
    const int64_t partitions = (n - kLagkvSinks) / lag_;
    if (partitions < 2) {  // recency, behind the sinks
      if (n > kLagkvSinks)
        score.slice(0, kLagkvSinks) = at::arange(n - kLagkvSinks) / (n - kLagkvSinks);
      return lane.ToSlots(score);
    }
    const at::Tensor compared = (LagRelative(lane, lane.keys(), partitions) +
                                 LagRelative(lane, lane.values(), partitions)) /
                                2;  // [partitions - 1, lag]
    // A rank hides that a number is none; 0 x NaN does not.
    const at::Tensor part = cross_scoring_ ? compared : Ranks(compared) / lag_ + 0 * compared;
    score.narrow(0, kLagkvSinks, part.numel()).copy_(part.flatten());
    return lane.ToSlots(score);
  }

  // How unevenly a row lies between the least and the most of the next partition, channel by
  // channel, as a share of its partition. x: by slot, [n, width] -> [partitions - 1, lag]
  at::Tensor LagRelative(Lane& lane, const at::Tensor& x, int64_t partitions) const {
    const int64_t* const slot = lane.by_birth().const_data_ptr<int64_t>();
    const int64_t width = x.size(1);
    std::vector<const float*> rows(partitions * lag_);
    for (int64_t i = 0; i < std::ssize(rows); ++i) {
      rows[i] = x.const_data_ptr<float>() + slot[kLagkvSinks + i] * x.stride(0);
    }
    at::Tensor deviation = at::zeros({partitions - 1, lag_});
    std::vector<float> least(width), factor(width);
    for (int64_t partition = 0; partition + 1 < partitions; ++partition) {
      const auto next = absl::MakeConstSpan(rows).subspan((partition + 1) * lag_, lag_);
      BoundChannels(next, width, least.data(), factor.data());
      for (int64_t c = 0; c < width; ++c) {
        const float range = factor[c] - least[c];
        // A channel that does not vary there is no measure.
        factor[c] = range == 0 ? 0 : std::min(1 / range, std::numeric_limits<float>::max());
      }
      AddDeviations(absl::MakeConstSpan(rows).subspan(partition * lag_, lag_), 0, width,
                    least.data(), factor.data(),
                    deviation.mutable_data_ptr<float>() + partition * lag_);
    }
    return deviation.softmax(-1);
  }

  const int64_t lag_;
  const bool cross_scoring_;
};

}  // namespace

extern constinit const PolicySpec kLagkv{
    .name = "lagkv",
    .summary =
        "drops the tokens whose rows lie most evenly in the range of the partition after "
        "theirs",
    .paper = "arXiv 2504.04704 (LagKV)",
    .evidence = "golden: kvpress 0.5.5 `LagKVPress`",
    .params = kLagkvParams,
    .scores = true,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{
              .granularity = Granularity::kHead,
              .signals = Signal::kKeys | Signal::kValues,
              .prompt = PromptEviction::kByChunk,
              .slack = params.Int("slack"),
              .published = {.prompt = false, .sinks = kLagkvSinks, .recent = params.Int("lag")}};
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<LagKvPolicy>(params);
    },
};

}  // namespace epikv
