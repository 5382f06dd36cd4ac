#include <ATen/ATen.h>

#include <algorithm>

#include "policies/scored_policy.h"
#include "policies/window_score.h"

namespace epikv {
namespace {

constexpr absl::string_view kRedundancies[] = {"exact", "linear"};

const ParamSpec kParams[] = {
    {.name = "lambda",
     .type = ParamType::kFloat,
     .fallback = 0.5,
     .max = 1,
     .help = "weight of importance, against that of redundancy. The authors' code says 0.07 and "
             "their README 0.1; two other engines measured 0.5 to be 7 to 9 points better"},
    WindowParam(8),
    PoolKernelParam(7),
    {.name = "redundancy",
     .type = ParamType::kChoice,
     .fallback = std::string("exact"),
     .choices = kRedundancies,
     .help = "exact: the newest of a token's duplicates is not blamed for it, in time that grows "
             "with the square of the lane; linear: every duplicate is"},
    {.name = "compat",
     .type = ParamType::kBool,
     .fallback = false,
     .help = "as the authors' code has it: tokens without a duplicate spare the oldest token (with "
             "redundancy = exact)"},
    SlackParam(127),
};

class RKv final : public ScoredPolicy {
 public:
  explicit RKv(const Params& params)
      : ScoredPolicy(Granularity::kHead),
        lambda_(params.Float("lambda")),
        kernel_(params.Int("kernel")),
        exact_(params.Choice("redundancy") == "exact"),
        compat_(params.Bool("compat")) {}

 private:
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    // The largest logit of the group, before any softmax; that one over the tokens before the
    // window alone.
    const at::Tensor logits =
        BeforeWindow(lane, std::get<0>(lane.window_logits().max(0)));  // [w, before]
    const int64_t before = logits.size(1);
    const at::Tensor importance =
        PoolNeighbours(logits.softmax(-1).mean(0, /*keepdim=*/true), kernel_, "max").squeeze(0);
    const at::Tensor redundancy = Similarity(lane).softmax(-1).narrow(0, 0, before);
    return WithWindow(lane, lambda_ * importance - (1 - lambda_) * redundancy);
  }

  // Mean cosine of a token's key with those of the lane. In birth order, [n].
  at::Tensor Similarity(Lane& lane) const {
    const at::Tensor keys = lane.keys().index_select(0, lane.by_birth());
    const at::Tensor unit = keys / (keys.norm(2, -1, /*keepdim=*/true) + 1e-8);  // [n, key_width]
    const int64_t n = unit.size(0);
    if (!exact_) return (unit.matmul(unit.sum(0)) - unit.square().sum(-1)) / n;

    constexpr double kDuplicate = 0.5;
    constexpr int64_t kRows = 256;  // at a time: [n, n] at once is memory that is touched once
    at::Tensor sum = at::zeros({n});
    const at::Tensor column = at::arange(n, at::kFloat);
    for (int64_t begin = 0; begin < n; begin += kRows) {
      const int64_t end = std::min(n, begin + kRows);
      const at::Tensor token = at::arange(begin, end, at::kLong);
      const at::Tensor cosine = unit.slice(0, begin, end).matmul(unit.t());  // [rows, n]
      cosine.scatter_(1, token.unsqueeze(1), 0);
      const at::Tensor latest =
          at::where(cosine > kDuplicate, column, -1).amax(-1).to(at::kLong);  // [rows]
      // Where there is none: an entry that is zero already.
      const at::Tensor spared =
          at::where(latest >= 0, latest, compat_ ? at::zeros_like(token) : token);
      sum += cosine.scatter_(1, spared.unsqueeze(1), 0).sum(0);
    }
    return sum / n;
  }

  const double lambda_;
  const int64_t kernel_;
  const bool exact_, compat_;
};

}  // namespace

extern constinit const PolicySpec kRkv{
    .name = "rkv",
    .summary = "drops the tokens that the newest queries use least and whose keys repeat others'",
    .paper = "arXiv 2505.24133",
    .evidence = "golden: Zefan-Cai/R-KV d15c976 `R1KV` (redundancy = exact); linear: rkv_test.cc",
    .params = kParams,
    .complete = [](Params& params, const ModelShape&) { return CheckWindow(params); },
    .traits =
        [](const Params& params, const ModelShape&) {
          PolicyTraits traits = WindowTraits(params);
          traits.published.prompt = false;
          return traits;
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<RKv>(params);
    },
};

}  // namespace epikv
