#include "runtime/request/lookahead.h"

namespace epikv {

PolicyTraits LookaheadTraits(const PolicyTraits& traits) {
  return {.evicts = false,
          .granularity = Granularity::kHead,
          .signals = Signal::kQueries,
          .window = traits.lookahead};
}

Request LookaheadRequest(const Request& request) {
  const std::vector<int64_t>& capacity = request.demand.lookahead;
  return {.id = request.id,
          .prompt = request.prompt,
          .spec = request.spec,
          .traits = LookaheadTraits(request.traits),
          .budget = request.budget,
          .positions = request.positions,
          .bypass_prefix_cache = true,
          .demand = {.budget = capacity, .prefill = capacity, .decode = capacity}};
}

}  // namespace epikv
