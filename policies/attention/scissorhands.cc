#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "policies/scored_policy.h"
#include "policies/window_score.h"

namespace epikv {
namespace {

constexpr absl::string_view kHistories[] = {"count", "mass"};

const ParamSpec kParams[] = {
    WindowParam(400),
    {.name = "history",
     .type = ParamType::kChoice,
     .fallback = std::string("count"),
     .choices = kHistories,
     .help = "count: how many of the window's queries gave the token less than their mean; mass: "
             "how much they gave it"},
    SlackParam(127),
};

class Scissorhands final : public ScoredPolicy {
 public:
  explicit Scissorhands(const Params& params)
      : ScoredPolicy(Granularity::kHead), count_(params.Choice("history") == "count") {}

 private:
  at::Tensor Score(const EvictionTask&, Lane& lane) const override {
    return count_ ? -Unimportant(lane) : lane.window_attention().mean({0, 1});
  }

  // How many of the window's queries gave a token less than their mean, averaged over query heads.
  // A weight below 1 / seen is a logit below log-sum-exp - log(seen): no weight is made. [n]
  static at::Tensor Unimportant(Lane& lane) {
    constexpr int64_t kRows = 32;  // whose logits stay in the second-level cache
    const int64_t group = lane.group(), w = lane.queries().size(1), n = lane.index().size(0);
    const int64_t first = lane.cache().newest() + 1 - w;  // token of the oldest query
    const at::Tensor queries =
        (lane.queries() * lane.cache().attention_scale(lane.layer())).transpose(0, 1).flatten(0, 1);
    const at::Tensor keys = lane.keys().t();
    const at::Tensor young = (lane.index() > first).nonzero().flatten();  // slots

    at::Tensor count = at::zeros(n);
    for (int64_t begin = 0; begin < w * group; begin += kRows) {
      at::Tensor logits = queries.slice(0, begin, begin + kRows).matmul(keys);  // [rows, n]
      const at::Tensor asked =
          at::arange(begin, begin + logits.size(0), at::kLong).div_(group, "floor").add_(first);
      const at::Tensor unseen =  // [rows, young]
          lane.index().index_select(0, young).unsqueeze(0) > asked.unsqueeze(1);
      logits.index_copy_(1, young,
                         logits.index_select(1, young).masked_fill_(
                             unseen, -std::numeric_limits<float>::infinity()));
      const at::Tensor seen = (n - unseen.sum(-1)).to(at::kFloat);
      const at::Tensor limit = (logits.logsumexp(-1) - seen.log())
                                   .masked_fill_(seen == 0, std::numeric_limits<float>::infinity());
      AddBelow(logits, limit, count);
      count.index_add_(0, young, unseen.sum(0).to(at::kFloat), -1);  // they are below any limit
    }
    return count / group;
  }

  // Adds how many rows are below their limit: by column. What is no number stays none.
  static void AddBelow(const at::Tensor& rows, const at::Tensor& limits, at::Tensor& count) {
    const int64_t n = rows.size(1);
    float* const sum = count.mutable_data_ptr<float>();
    for (int64_t row = 0; row < rows.size(0); ++row) {
      const float* const x = rows.const_data_ptr<float>() + row * n;
      const float limit = limits.const_data_ptr<float>()[row];
      const float none = std::isnan(limit) ? limit : 0.0f;
      for (int64_t i = 0; i < n; ++i) sum[i] += x[i] < limit ? 1.0f : none;
    }
  }

  const bool count_;
};

}  // namespace

extern constinit const PolicySpec kScissorhands{
    .name = "scissorhands",
    .summary = "drops the tokens that the newest queries most often found unimportant",
    .paper = "arXiv 2305.17118",
    .evidence =
        "golden: guozhiyu/vatp 39ea686 `LlamaAttention_heavy_hitter` (history = mass); "
        "count: scissorhands_test.cc",
    .params = kParams,
    .traits =
        [](const Params& params, const ModelShape&) {
          PolicyTraits traits = WindowTraits(params);
          traits.published = {.prompt = false, .recent = 10};
          return traits;
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Scissorhands>(params);
    },
};

}  // namespace epikv
