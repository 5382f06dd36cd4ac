#include "policies/attention/laq.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace epikv {
namespace {

const ParamSpec kLaqParams[] = {
    WindowParam(32), PoolKernelParam(7),  PoolModeParam("max"), GqaParam("mean"),
    DraftParam(),    PseudoTokensParam(), LaqCompatParam(),     SlackParam(63),
};

// As the authors' code hides keys: as if the m queries had been asked by the newest m tokens, so
// that row j does not see the m - 1 - j newest. logits: [group, m, n]
void HideAsTheirs(Lane& lane, at::Tensor& logits) {
  const int64_t m = logits.size(1), newest = lane.cache().newest();
  const at::Tensor last = at::arange(newest + 1 - m, newest + 1, at::kLong).unsqueeze(1);
  logits.masked_fill_(lane.index() > last, -std::numeric_limits<float>::infinity());
}

}  // namespace

ParamSpec LaqCompatParam() {
  return {.name = "compat",
          .type = ParamType::kBool,
          .fallback = false,
          .help =
              "as the authors' code has it: queries told ahead do not see all of the prompt's "
              "newest tokens"};
}

absl::Status Laq::Complete(Params& params) { return CheckWindow(params); }

PolicyTraits Laq::Traits(const Params& params, int64_t prompt_queries) {
  PolicyTraits traits = WindowTraits(params);
  traits.published.recent = prompt_queries;
  AddLookahead(params, traits);
  return traits;
}

at::Tensor Laq::Score(const EvictionTask&, Lane& lane) const {
  const int64_t ahead = lane.lookahead().size(1);
  if (ahead == 0) return WindowScore(lane, lane.window_attention(), params_);
  const int64_t asked = std::min(prompt_queries_, lane.queries().size(1));
  at::Tensor logits = lane.Logits(asked);
  if (params_.Bool("compat")) HideAsTheirs(lane, logits);
  const int64_t before = lane.index().size(0) - asked;
  const at::Tensor seen = SoftmaxOfSeen(logits)
                              .mean(1)
                              .index_select(-1, lane.by_birth())
                              .narrow(-1, 0, before);  // [group, before]
  const at::Tensor score =
      ReduceGroup(PoolNeighbours(seen, params_.Int("kernel"), params_.Choice("pooling")),
                  params_.Choice("gqa"));
  return WithWindow(lane, score);
}

extern constinit const PolicySpec kLaq{
    .name = "laq",
    .summary =
        "drops the prompt's tokens to which queries of tokens told ahead attend least, and "
        "decoded ones as snapkv does",
    .paper = "arXiv 2505.20334 (LAQ)",
    .evidence = "cases: laq_test.cc (a golden of noforit/Lookahead_Q-Cache 74612bd)",
    .params = kLaqParams,
    .scores = true,
    .complete = [](Params& params, const ModelShape&) { return Laq::Complete(params); },
    .traits = [](const Params& params, const ModelShape&) { return Laq::Traits(params, 0); },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Laq>(params, 0);
    },
};

}  // namespace epikv
