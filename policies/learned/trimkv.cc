#include "policies/policy.h"
#include "policies/retention.h"

// TRIM-KV. A gate at each layer's attention input says for each KV head how fast a token is
// forgotten; the cache keeps what is remembered best.

namespace epikv {
namespace {

const ParamSpec kTrimkvParams[] = {LookaheadParam(), SlackParam(127)};

}  // namespace

extern constinit const PolicySpec kTrimkv{
    .name = "trimkv",
    .summary =
        "drops the tokens of which a gate, trained on the model, said at their birth that their "
        "head will have forgotten most of them by now",
    .paper = "arXiv 2512.03324 (TRIM-KV)",
    .evidence = "golden: ngocbh/trimkv 0456bc4 `TrimKVCache`",
    .params = kTrimkvParams,
    .scores = true,
    .read_data = [](const ArtefactData& artefact,
                    const ModelShape& shape) { return ReadRetentionGate(artefact, shape, 2); },
    .traits = [](const Params& params, const ModelShape&) { return RetentionTraits(params); },
    .make = [](const Params& params, const ModelShape& shape) -> std::shared_ptr<const Policy> {
      return MakeRetentionPolicy(params, {.granularity = Granularity::kHead},
                                 shape.artefacts.at("trimkv"));
    },
};

}  // namespace epikv
