#pragma once

#include "policies/spec.h"

namespace epikv {

// For tests of the runtime: every (layer, kv head) has another capacity, from half of the budget to
// one and a half, and keeps other tokens. Sees the whole prompt before it evicts. Before each round
// it checks that its column and the K and V rows still belong to the tokens in `index`; if not, it
// answers INTERNAL.
extern const PolicySpec kRaggedPolicy;

}  // namespace epikv
