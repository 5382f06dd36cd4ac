#pragma once

#include <cstdint>
#include <vector>

#include "policies/spec.h"
#include "runtime/kernels/kv_format.h"
#include "runtime/kernels/tier_format.h"
#include "runtime/request/request.h"

namespace epikv {

// Sizes of what a sequence stores, in bytes.
struct KvLayout {
  int64_t num_lanes = 0;    // layers x kv_heads
  int64_t row_bytes = 0;    // one K and one V row
  int64_t bound_bytes = 0;  // of the bounds of one K row's page, its share
  int64_t num_tables = 0;   // slot tables: one, one per layer, or one per lane
  int64_t slot_bytes = 0;   // of one slot in one table: index, rope position, policy columns
  int64_t state_bytes_per_token = 0;  // of the longest lane
  int64_t state_bytes = 0;
  int64_t pass_bytes = 0;          // of a scratch pass: the queries that are kept of it
  int64_t step_bytes_per_row = 0;  // of each row of a forward, while it runs
};
// guess_tokens: Request's. What is measured of a decode step is measured of each guess, too.
KvLayout LayoutOf(const ModelShape& shape, const KvFormat& format, const PolicyTraits& traits,
                  int64_t num_tap_layers, PositionMode positions = PositionMode::kAbsolute,
                  const ReadLimit& read = {}, int64_t guess_tokens = 0);

// Of keys that were demoted one after another, bounds are kept together (page_bounds.h).
inline constexpr int64_t kTierPage = 16;  // tokens

// Bytes of a tier (SequenceTier) of so many tokens for each slot table.
int64_t TierBytes(const KvLayout& layout, const ModelShape& shape, const TierFormat& format,
                  int64_t tokens);

// Bytes of the packet that a request can leave, at most.
int64_t MostPacketBytes(const KvLayout& layout, const Request& request);

// Bytes of lanes with these capacities (tokens), tables and state included.
int64_t BytesOf(const KvLayout& layout, const std::vector<int64_t>& capacities);

}  // namespace epikv
