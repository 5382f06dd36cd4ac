#pragma once

#include <cstdint>

#include "policies/policy.h"
#include "policies/spec.h"

// Lookahead (LAQ, arXiv 2505.20334): before a prompt over its budget is evicted, the model goes on
// for some tokens over a draft, a copy of the cache that lacks what a cheaper policy would drop.
// Their queries are asked beside the prompt's newest: they resemble those that are to come.

namespace epikv {

ParamSpec PseudoTokensParam();  // `pseudo_tokens`
ParamSpec DraftParam();         // `draft`: who thins the draft out
// `queries`: recent, or lookahead. Of policies that may do without; with the two above.
ParamSpec QueriesParam();

// PolicyTraits::pass: where `queries` says so, or always where there is no such parameter.
void AddLookahead(const Params& params, PolicyTraits& traits);

// Policy::Draft by the parameter `draft`: snapkv with max-pooling over 7 neighbours, of the newest
// 32 queries at most; or streaming_llm with four sinks. Of policies with kQueries and kKeys.
Eviction DraftOf(const EvictionTask& task, const Params& params);

}  // namespace epikv
