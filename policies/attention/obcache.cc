#include <ATen/ATen.h>

#include <optional>

#include "policies/scored_policy.h"
#include "policies/window_score.h"

namespace epikv {
namespace {

constexpr absl::string_view kPrunes[] = {"value", "key", "joint"};
constexpr absl::string_view kReduces[] = {"after", "before"};

const ParamSpec kObcacheParams[] = {
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
    {.name = "accumulate",
     .type = ParamType::kBool,
     .fallback = false,
     .help = "sum over all decode steps, and over the window at the prompt's end, instead of the "
             "mean over the window of the round"},
    SlackParam(63),
};

// Optimal brain damage of the cache: the square of how fast each query's output changes as a
// token's value (A v), its key (A Z (v - o)), or both, shrink to nothing. A: attention; Z: logits,
// or their slopes.
// Column `saliency`, with `accumulate`: the sum so far, of the query heads that share the lane.
class ObCache final : public ScoredPolicy {
 public:
  explicit ObCache(const Params& params)
      : ScoredPolicy(Granularity::kHead), params_(params), accumulate_(params.Bool("accumulate")) {}

  void Observe(absl::Span<SequenceStep> steps) const override {
    if (!accumulate_) return;
    for (SequenceStep& step : steps) {
      // A prompt counts once it is whole, however it was cut up.
      if (step.first + step.count < step.cache.prompt_tokens()) continue;
      for (int64_t layer = 0; layer < step.cache.num_layers(); ++layer) {
        for (int64_t head = 0; head < step.cache.num_kv_heads(); ++head) {
          Lane lane(step.cache, layer, head);
          lane.column(0) += ReduceGroup(Newest(step.phase, lane), params_.Choice("gqa")).sum(0);
        }
      }
    }
  }

 private:
  at::Tensor Score(const EvictionTask&, Lane& lane) const override {
    if (!accumulate_) return WindowScore(lane, OfWindow(lane), params_);
    const at::Tensor in_order = lane.column(0).index_select(0, lane.by_birth()).unsqueeze(0);
    return lane.ToSlots(
        PoolNeighbours(in_order, params_.Int("kernel"), params_.Choice("pooling")).squeeze(0));
  }

  // Of the queries of a step that count: in prefill of the window. [group, w, n], or [1, w, n]
  at::Tensor Newest(Phase phase, Lane& lane) const {
    if (phase == Phase::kPrefill) return OfWindow(lane);
    const at::Tensor logits = lane.Logits(1);
    return Saliency(lane, Slopes(lane, logits), SoftmaxOfSeen(logits));
  }

  at::Tensor OfWindow(Lane& lane) const {
    return Saliency(lane, Slopes(lane, lane.window_logits()), lane.window_attention());
  }

  // How fast logits change as their keys shrink: as large as they are, Z; under a soft cap, where Z
  // is cap tanh(z / cap), z (1 - tanh^2). Of tokens that a query does not see, which have no
  // attention to lose, 0.
  static at::Tensor Slopes(Lane& lane, const at::Tensor& logits) {
    const at::Tensor seen = logits.masked_fill(logits.isneginf(), 0);
    const std::optional<double> cap = lane.cache().attention(lane.layer()).soft_cap;
    if (!cap.has_value()) return seen;
    constexpr double kLargest = 1 - 0x1p-23;  // the slope beyond is nothing
    const at::Tensor tanh = (seen / *cap).clamp(-kLargest, kLargest);
    return tanh.atanh() * *cap * (1 - tanh.square());
  }

  // by_head: of the lane's query heads. [group, w, n], or [1, w, n]
  at::Tensor Saliency(Lane& lane, const at::Tensor& slopes_by_head,
                      const at::Tensor& attention_by_head) const {
    const bool before = params_.Choice("reduce") == "before";
    auto reduced = [=](const at::Tensor& x) { return before ? x.mean(0, /*keepdim=*/true) : x; };
    const at::Tensor attention = reduced(attention_by_head);
    const at::Tensor& values = lane.values();
    const at::Tensor value = values.square().sum(-1);  // |v|^2, [n]
    const at::Tensor squared = attention.square();
    const std::string& prune = params_.Choice("prune");
    if (prune == "value") return squared * value;

    const at::Tensor slopes = reduced(slopes_by_head);
    const at::Tensor output = attention.matmul(values);  // [group, w, value_width]
    const at::Tensor along = output.matmul(values.t());  // v . o, [group, w, n]
    const at::Tensor apart =                             // |v - o|^2
        value + output.square().sum(-1, /*keepdim=*/true) - 2 * along;
    const at::Tensor key = squared * slopes.square() * apart;
    if (prune == "key") return key;
    return squared * value + key + 2 * squared * slopes * (value - along);
  }

  const Params params_;
  const bool accumulate_;
};

}  // namespace

extern constinit const PolicySpec kObcache{
    .name = "obcache",
    .summary = "drops the tokens without which the newest queries' outputs change least",
    .paper = "arXiv 2510.07651",
    .evidence = "cases: obcache_test.cc (the change is measured)",
    .params = kObcacheParams,
    .scores = true,
    .complete = [](Params& params, const ModelShape&) { return CheckWindow(params); },
    .traits =
        [](const Params& params, const ModelShape&) {
          PolicyTraits traits = WindowTraits(params, Signal::kValues);
          traits.floats_per_token *= 2;  // slopes, and parts of the saliency
          traits.published.prompt = false;
          traits.published.sinks = 4;
          if (params.Bool("accumulate")) {
            traits.columns = {"saliency"};
            traits.published.recent = 20;
          }
          return traits;
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<ObCache>(params);
    },
};

}  // namespace epikv
