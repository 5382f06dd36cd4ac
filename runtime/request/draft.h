#pragma once

#include "policies/spec.h"
#include "runtime/request/request.h"

// A draft: a copy of a prompt's cache over which tokens are told ahead. It is as the cache of a
// request of its own, which has no policy. Without torch.

namespace epikv {

// What it needs from the runtime.
PolicyTraits DraftTraits();

// The request that it is of. Requires: request.demand.draft.
Request DraftRequest(const Request& request);

}  // namespace epikv
