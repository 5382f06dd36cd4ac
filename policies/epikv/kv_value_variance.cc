#include "policies/epikv/flat_score.h"
#include "policies/frozen_policy.h"
#include "policies/row_stats.h"

namespace epikv {
namespace {

const ParamSpec kKvValueVarianceParams[] = {RowWindowParam(), SlackParam(0)};

}  // namespace

extern constinit const PolicySpec kKvValueVariance{
    .name = "kv_value_variance",
    .summary = "drops the tokens of stretches whose values vary least over their channels",
    .paper = "arXiv 2606.26472, KV-val",
    .evidence = "golden: stevenkolawole/epiphany-kv-cache d424208 `KVValVarianceEviction`",
    .params = kKvValueVarianceParams,
    .traits = [](const Params& params,
                 const ModelShape&) { return RowVarianceTraits(params, Signal::kValues); },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return MakeRowVariance(params, RowKind::kValue);
    },
};

}  // namespace epikv
