#pragma once

#include <memory>

#include "policies/policy.h"

namespace epikv {

// Guard (guard.h) around a policy that scores tokens, keep decision by keep decision. What is asked
// for are tokens with much of a decode query's attention, over what is cached and what lies in the
// tier (ours; the paper's caches have requests). One that was dropped comes back at the next round,
// and is guarded until the phase ends. Throws std::invalid_argument if `inner` is no ScoredPolicy.
std::shared_ptr<const Policy> GuardedPolicy(std::shared_ptr<const Policy> inner,
                                            Granularity granularity, const GuardRule& rule);

}  // namespace epikv
