#include "policies/policy.h"

namespace epikv {
namespace {

class Full final : public Policy {
 public:
  std::vector<Eviction> Evict(absl::Span<EvictionTask> tasks) const override {
    return std::vector<Eviction>(tasks.size(),
                                 {.status = absl::InternalError("'full' was asked to evict")});
  }
};

}  // namespace

extern constinit const PolicySpec kFull{
    .name = "full",
    .summary = "keeps every token",
    .evidence = "cases: laws_test.cc, law 1",
    .traits = [](const Params&, const ModelShape&) { return PolicyTraits{.evicts = false}; },
    .make = [](const Params&, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Full>();
    },
};

}  // namespace epikv
