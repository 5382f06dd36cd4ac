#include "policies/epikv/lag_kv.h"

namespace epikv {
namespace {

const ParamSpec kEpikvLagKvParams[] = {ChunkParam(), SlackParam(0)};

}  // namespace

extern constinit const PolicySpec kEpikvLagKv{
    .name = "epikv_lag_kv",
    .summary =
        "drops the tokens whose keys and values vary least over channels, against the chunk before",
    .paper = "arXiv 2606.26472, Lag-KV",
    .evidence = "golden: stevenkolawole/epiphany-kv-cache d424208 `LagKVEviction`",
    .params = kEpikvLagKvParams,
    .scores = true,
    .traits =
        [](const Params& params, const ModelShape& shape) {
          return LagKv::Traits(params, shape, LagKv::Rows::kKeysAndValues);
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<LagKv>(params, LagKv::Rows::kKeysAndValues);
    },
};

}  // namespace epikv
