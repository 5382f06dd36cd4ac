#include "policies/epikv/lag_kv.h"

namespace epikv {
namespace {

const ParamSpec kEpikvLagKvKeyParams[] = {ChunkParam(), SlackParam(0)};

}  // namespace

extern constinit const PolicySpec kEpikvLagKvKey{
    .name = "epikv_lag_kv_key",
    .summary = "drops the tokens whose keys vary least over channels, against the chunk before",
    .paper = "arXiv 2606.26472, Lag-KV-key",
    .evidence = "golden: stevenkolawole/epiphany-kv-cache d424208 `LagKVKeyVarianceEviction`",
    .params = kEpikvLagKvKeyParams,
    .scores = true,
    .traits =
        [](const Params& params, const ModelShape& shape) {
          return LagKv::Traits(params, shape, LagKv::Rows::kKeys);
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<LagKv>(params, LagKv::Rows::kKeys);
    },
};

}  // namespace epikv
