#include "policies/attention/laq.h"

namespace epikv {
namespace {

constexpr int64_t kPromptQueries = 8;

const ParamSpec kLaqPlusParams[] = {
    WindowParam(32), PoolKernelParam(7),  PoolModeParam("max"), GqaParam("mean"),
    DraftParam(),    PseudoTokensParam(), LaqCompatParam(),     SlackParam(63),
};

}  // namespace

extern constinit const PolicySpec kLaqPlus{
    .name = "laq_plus",
    .summary = "laq, by the prompt's newest 8 queries as well",
    .paper = "arXiv 2505.20334 (LAQ++)",
    .evidence = "cases: laq_test.cc (a golden of noforit/Lookahead_Q-Cache 74612bd)",
    .params = kLaqPlusParams,
    .scores = true,
    .complete = [](Params& params, const ModelShape&) { return Laq::Complete(params); },
    .traits = [](const Params& params,
                 const ModelShape&) { return Laq::Traits(params, kPromptQueries); },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Laq>(params, kPromptQueries);
    },
};

}  // namespace epikv
