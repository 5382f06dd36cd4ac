#include <ATen/ATen.h>

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
    const at::Tensor& attention = lane.window_attention();  // [group, w, n]
    if (!count_) return attention.mean({0, 1});
    const at::Tensor sees = lane.window_logits().isneginf().logical_not_();
    const at::Tensor mean = sees.sum(-1, /*keepdim=*/true).to(at::kFloat).reciprocal();
    const at::Tensor unimportant = (attention < mean).logical_and_(sees).to(at::kFloat);
    // What is no number stays none.
    return -at::where(attention.isnan(), attention, unimportant).sum(1).mean(0);
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
