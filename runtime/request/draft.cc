#include "runtime/request/draft.h"

namespace epikv {

PolicyTraits DraftTraits() { return {.evicts = false, .granularity = Granularity::kHead}; }

Request DraftRequest(const Request& request) {
  const std::vector<int64_t>& capacity = request.demand.draft;
  return {.id = request.id,
          .prompt = request.prompt,
          .spec = request.spec,
          .traits = DraftTraits(),
          .budget = request.budget,
          .positions = request.positions,
          .bypass_prefix_cache = true,
          .demand = {.budget = capacity, .prefill = capacity, .decode = capacity}};
}

}  // namespace epikv
