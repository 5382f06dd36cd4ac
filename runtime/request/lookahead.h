#pragma once

#include "policies/spec.h"
#include "runtime/request/request.h"

// A lookahead runs over a copy of a prompt's cache, as a request of its own that keeps nothing but
// queries. Without torch.

namespace epikv {

// What the copy needs from the runtime. traits: of the policy that looks ahead.
PolicyTraits LookaheadTraits(const PolicyTraits& traits);

// The request that the copy is of. Requires: request.demand.lookahead.
Request LookaheadRequest(const Request& request);

}  // namespace epikv
