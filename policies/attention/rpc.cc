#include <ATen/ATen.h>

#include "policies/scored_policy.h"
#include "policies/window_score.h"

namespace epikv {
namespace {

constexpr absl::string_view kAggregations[] = {"all", "group"};

const ParamSpec kRpcParams[] = {
    WindowParam(32),
    PoolKernelParam(7),
    PoolModeParam("avg"),
    GqaParam("mean"),
    {.name = "aggregation",
     .type = ParamType::kChoice,
     .fallback = std::string("all"),
     .choices = kAggregations,
     .help = "query heads that `gqa` makes one: all of a layer, whose heads then keep the same "
             "tokens; or those of a KV head"},
    {.name = "compat",
     .type = ParamType::kBool,
     .fallback = false,
     .help = "as the authors' code has it: the newest query counts twice, the window's oldest not "
             "at all"},
    SlackParam(1023),
};

bool ByLayer(const Params& params) { return params.Choice("aggregation") == "all"; }

// What the window's queries give each decoded token before the window, and what they give those
// alone. The prompt has no score.
class Rpc final : public ScoredPolicy {
 public:
  explicit Rpc(const Params& params)
      : ScoredPolicy(ByLayer(params) ? Granularity::kLayer : Granularity::kHead), params_(params) {}

 private:
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    const int64_t before = lane.index().size(0) - lane.window_tokens();
    const int64_t prompt = lane.index()
                               .index_select(0, lane.by_birth().narrow(0, 0, before))
                               .lt(task.cache.prompt_tokens())
                               .sum()
                               .item<int64_t>();
    at::Tensor given = Given(lane, prompt);
    for (int64_t head = 1; ByLayer(params_) && head < task.cache.num_kv_heads(); ++head) {
      Lane other(task.cache, lane.layer(), head);
      given = at::cat({given, Given(other, prompt)});
    }
    const at::Tensor one = ReduceGroup(given, params_.Choice("gqa")).unsqueeze(0);
    const at::Tensor pooled = PoolNeighbours(one, params_.Int("kernel"), params_.Choice("pooling"));
    return WithWindow(lane, at::cat({at::zeros(prompt), pooled.squeeze(0)}))
        .masked_fill_(lane.index() < task.cache.prompt_tokens(), 0);  // also within the window
  }

  // Summed over the window's queries, in birth order behind `prompt` tokens. [group, decoded]
  at::Tensor Given(Lane& lane, int64_t prompt) const {
    const at::Tensor logits = BeforeWindow(lane, lane.window_logits());
    const at::Tensor attention =
        SoftmaxOfSeen(logits.narrow(-1, prompt, logits.size(-1) - prompt));  // [group, w, decoded]
    const at::Tensor sum = attention.sum(1);
    if (!params_.Bool("compat")) return sum;
    return sum - attention.select(1, 0) + attention.select(1, -1);
  }

  const Params params_;
};

}  // namespace

extern constinit const PolicySpec kRpc{
    .name = "rpc",
    .summary = "drops the decoded tokens to which the newest queries attend least, per layer",
    .paper = "arXiv 2505.13866 (Reasoning Path Compression)",
    .evidence = "golden: jiwonsong-dev/ReasoningPathCompression 00e64b7 `RPCCluster`",
    .params = kRpcParams,
    .scores = true,
    .complete = [](Params& params, const ModelShape&) { return CheckWindow(params); },
    .traits =
        [](const Params& params, const ModelShape&) {
          PolicyTraits traits = WindowTraits(params);
          if (ByLayer(params)) traits.granularity = Granularity::kLayer;
          traits.prompt = PromptEviction::kRefuses;
          return traits;
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Rpc>(params);
    },
};

}  // namespace epikv
