#include <ATen/ATen.h>

#include <numeric>

#include "policies/scored_policy.h"

namespace epikv {
namespace {

constexpr int64_t kSinks = 4;  // tokens before the first partition

const ParamSpec kParams[] = {
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

// How unevenly a row lies between the least and the most of the next partition, channel by channel,
// as a share of its partition. x: [partitions, lag, width] -> [partitions - 1, lag]
at::Tensor LagRelative(const at::Tensor& x) {
  const at::Tensor next = x.slice(0, 1), rows = x.slice(0, 0, -1);
  const at::Tensor least = next.amin(1, /*keepdim=*/true);
  const at::Tensor range = next.amax(1, /*keepdim=*/true) - least;
  // A channel that does not vary there is no measure.
  const at::Tensor scaled = ((rows - least) / range).masked_fill(range == 0, 0);
  return scaled.std(-1).softmax(-1);
}

// Places in ascending order along the last dimension; of equals the newer is higher.
at::Tensor Ranks(const at::Tensor& x) {
  return x.argsort(/*stable=*/true, -1, /*descending=*/false).argsort();
}

// Partitions are of what is cached, in birth order, anew in each round. The newest whole partition
// and what follows it have nothing to be compared with, and rank above all others.
class LagKv final : public ScoredPolicy {
 public:
  explicit LagKv(const Params& params)
      : ScoredPolicy(Granularity::kHead),
        lag_(params.Int("lag")),
        cross_scoring_(params.Bool("cross_scoring")) {}

 private:
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    const int64_t n = lane.index().numel();
    at::Tensor score = at::ones(n);  // in birth order
    const int64_t partitions = (n - kSinks) / lag_;
    if (partitions < 2) {  // recency, behind the sinks
      if (n > kSinks) score.slice(0, kSinks) = at::arange(n - kSinks) / (n - kSinks);
      return lane.ToSlots(score);
    }
    const at::Tensor compared = (LagRelative(Partitions(lane, lane.keys(), partitions)) +
                                 LagRelative(Partitions(lane, lane.values(), partitions))) /
                                2;  // [partitions - 1, lag]
    // A rank hides that a number is none; 0 x NaN does not.
    const at::Tensor part = cross_scoring_ ? compared : Ranks(compared) / lag_ + 0 * compared;
    score.narrow(0, kSinks, part.numel()).copy_(part.flatten());
    return lane.ToSlots(score);
  }

  // Rows in birth order, without the sinks and what is left over. [partitions, lag, width]
  at::Tensor Partitions(Lane& lane, const at::Tensor& rows, int64_t partitions) const {
    const at::Tensor tokens = lane.by_birth().narrow(0, kSinks, partitions * lag_);
    return rows.index_select(0, tokens).reshape({partitions, lag_, -1});
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
    .params = kParams,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{
              .granularity = Granularity::kHead,
              .signals = Signal::kKeys | Signal::kValues,
              .prompt = PromptEviction::kByChunk,
              .slack = params.Int("slack"),
              .published = {.prompt = false, .sinks = kSinks, .recent = params.Int("lag")}};
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<LagKv>(params);
    },
};

}  // namespace epikv
