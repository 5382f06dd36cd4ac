#include "policies/policy.h"

namespace epikv {
namespace {

const ParamSpec kQuestParams[] = {
    {.name = "page",
     .type = ParamType::kInt,
     .fallback = int64_t{16},
     .min = 4,
     .max = 256,
     .help = "tokens that are read together, or not"},
    {.name = "dense_layers",
     .type = ParamType::kInt,
     .fallback = int64_t{2},
     .max = 1024,
     .help = "the first layers, which read everything"},
};

// Attention chooses what it reads by the bounds of pages (runtime/kv/page_index.h); there is
// nothing left to do.
class Quest final : public Policy {
 public:
  std::vector<Eviction> Evict(absl::Span<EvictionTask> tasks) const override {
    return std::vector<Eviction>(tasks.size(),
                                 {.status = absl::InternalError("'quest' was asked to evict")});
  }
};

}  // namespace

extern constinit const PolicySpec kQuest{
    .name = "quest",
    .summary = "keeps every token, and reads the pages whose keys may meet the query best",
    .paper = "arXiv 2406.10774 (Quest)",
    .evidence =
        "cases: read_laws_test.cc, golden of its choice: mit-han-lab/Quest "
        "`local_heavy_hitter_mask`",
    .params = kQuestParams,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.evicts = false,
                              .reads = ReadRule{.page = params.Int("page"),
                                                .dense_layers = params.Int("dense_layers")}};
        },
    .make = [](const Params&, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Quest>();
    },
};

}  // namespace epikv
