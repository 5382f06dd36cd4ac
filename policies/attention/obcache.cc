#include <ATen/ATen.h>

#include "policies/scored_policy.h"
#include "policies/window_score.h"

namespace epikv {
namespace {

constexpr absl::string_view kPrunes[] = {"value", "key", "joint"};
constexpr absl::string_view kReduces[] = {"after", "before"};

const ParamSpec kParams[] = {
    {.name = "prune",
     .type = ParamType::kChoice,
     .fallback = std::string("key"),
     .choices = kPrunes,
     .help = "what is thought to shrink: a token's value, its key, or both together"},
    WindowParam(16),
    PoolKernelParam(7),
    PoolModeParam("max"),
    GqaParam("sum"),
    {.name = "reduce",
     .type = ParamType::kChoice,
     .fallback = std::string("after"),
     .choices = kReduces,
     .help = "when query heads of a KV head become one: after their saliency is known, by `gqa`; "
             "before, by averaging their weights and logits"},
    SlackParam(0),
};

// Optimal brain damage of the cache: the square of how fast each query's output changes as a
// token's value (A v), its key (A Z (v - o)), or both, shrink to nothing. A: attention; Z: logits.
class ObCache final : public ScoredPolicy {
 public:
  explicit ObCache(const Params& params) : ScoredPolicy(Granularity::kHead), params_(params) {}

 private:
  at::Tensor Score(const EvictionTask&, Lane& lane) const override {
    return WindowScore(lane, Saliency(lane), params_);
  }

  // [group, w, n], or [1, w, n]
  at::Tensor Saliency(Lane& lane) const {
    const bool before = params_.Choice("reduce") == "before";
    auto reduced = [=](const at::Tensor& x) { return before ? x.mean(0, /*keepdim=*/true) : x; };
    const at::Tensor attention = reduced(lane.window_attention());
    const at::Tensor& values = lane.values();
    const at::Tensor value = values.square().sum(-1);  // |v|^2, [n]
    const at::Tensor squared = attention.square();
    const std::string& prune = params_.Choice("prune");
    if (prune == "value") return squared * value;

    // Tokens that a query does not see have no attention to lose.
    const at::Tensor logits =
        reduced(lane.window_logits().masked_fill(lane.window_logits().isneginf(), 0));
    const at::Tensor output = attention.matmul(values);  // [group, w, value_width]
    const at::Tensor along = output.matmul(values.t());  // v . o, [group, w, n]
    const at::Tensor apart =                             // |v - o|^2
        value + output.square().sum(-1, /*keepdim=*/true) - 2 * along;
    const at::Tensor key = squared * logits.square() * apart;
    if (prune == "key") return key;
    return squared * value + key + 2 * squared * logits * (value - along);
  }

  const Params params_;
};

}  // namespace

extern constinit const PolicySpec kObcache{
    .name = "obcache",
    .summary = "drops the tokens without which the newest queries' outputs change least",
    .paper = "arXiv 2510.07651",
    .evidence = "cases: obcache_test.cc (the change is measured)",
    .params = kParams,
    .complete = [](Params& params, const ModelShape&) { return CheckWindow(params); },
    .traits =
        [](const Params& params, const ModelShape&) {
          PolicyTraits traits = WindowTraits(params, Signal::kValues);
          traits.published.prompt = false;
          traits.published.sinks = 4;
          return traits;
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<ObCache>(params);
    },
};

}  // namespace epikv
