#include "policies/attention/kvzip.h"

namespace epikv {
namespace {

const ParamSpec kKvzipPlusParams[] = {
    RepeatChunkParam(),
    AllocatorParam("model_pool"),
    FloorParam(0),
    SlackParam(63),
};

}  // namespace

extern constinit const PolicySpec kKvzipPlus{
    .name = "kvzip_plus",
    .summary = "kvzip, with attention weighed by what a token's value adds to the residual stream",
    .paper = "arXiv 2505.23416 (KVzip), as KVzip+ in kvpress",
    .evidence = "cases: kvzip_test.cc",
    .params = kKvzipPlusParams,
    .scores = true,
    .complete = [](Params& params, const ModelShape&) { return Kvzip::Complete(params); },
    .traits = [](const Params& params,
                 const ModelShape& shape) { return Kvzip::Traits(params, shape, true); },
    .lane_budgets = &RecipeLaneBudgets,
    .make = [](const Params& params, const ModelShape& shape) -> std::shared_ptr<const Policy> {
      return std::make_shared<Kvzip>(params, shape, true);
    },
};

}  // namespace epikv
