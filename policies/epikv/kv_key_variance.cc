#include "policies/epikv/flat_score.h"
#include "policies/frozen_policy.h"
#include "policies/row_stats.h"

namespace epikv {
namespace {

const ParamSpec kKvKeyVarianceParams[] = {RowWindowParam(), SlackParam(0)};

}  // namespace

extern constinit const PolicySpec kKvKeyVariance{
    .name = "kv_key_variance",
    .summary = "drops the tokens of stretches whose keys vary least over their channels",
    .paper = "arXiv 2606.26472, KV-key",
    .evidence = "golden: stevenkolawole/epiphany-kv-cache d424208 `KVKeyVarianceEviction`",
    .params = kKvKeyVarianceParams,
    .traits = [](const Params& params,
                 const ModelShape&) { return RowVarianceTraits(params, Signal::kKeys); },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return MakeRowVariance(params, RowKind::kKey);
    },
};

}  // namespace epikv
