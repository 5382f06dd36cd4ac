#pragma once

#include <cstdint>
#include <vector>

#include "runtime/kv/kv_layout.h"
#include "runtime/request/request.h"

namespace epikv {

// Rows of a scratch pass behind those of a prompt of so many tokens.
int64_t ScratchRows(const ScratchPass& pass, int64_t prefill);

// Lane capacities from lengths alone. budgets: of each lane; longest: tokens ever cached. Exact
// where all lanes have the same budget; an upper bound where they differ, for they have their
// rounds together.
KvDemand DemandOf(const Request& request, const std::vector<int64_t>& budgets, int64_t longest,
                  int64_t chunk, const KvLayout& layout);

// Adds the draft over which tokens are told ahead, if there is one. layout: of DraftTraits.
void AddDraft(const Request& request, const KvLayout& layout, KvDemand& demand);

}  // namespace epikv
