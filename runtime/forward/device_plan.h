#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "policies/spec.h"

// What one forward on a device reads and writes, as numbers. Without torch.

namespace epikv {

// One sequence's share of a forward.
struct DeviceItem {
  int64_t row = 0;  // its first row of the forward
  bool decode = false;
  absl::Span<const int32_t> tokens;     // one a row
  absl::Span<const int64_t> lanes;      // [layers x kv_heads] first row in the pool
  absl::Span<const int64_t> slots;      // [tables] slot that its first token takes
  absl::Span<const int64_t> positions;  // [tables] RoPE position of its first token
  absl::Span<const int64_t> used;       // [layers x kv_heads] slots that attention reads
  int64_t num_logits = 0;               // of its last rows
  absl::Span<const int64_t> taps;       // blocks after which its last row is looked at, ascending

  int64_t num_rows() const { return static_cast<int64_t>(tokens.size()); }
};

// All numbers of a step lie in one vector, so that one upload brings them to the device. n: the
// rows of the forward.
struct DevicePlan {
  struct Section {
    int64_t begin = 0, size = 0;  // in `numbers`
  };

  // One call of the attention kernel at every layer. Its sequences are lanes: (item, KV head), a
  // query of the kernel is one row's group of query heads.
  struct Call {
    bool causal = false;              // rows of prompts; else decoded ones, which see every slot
    bool in_order = false;            // query_rows are 0, 1, .. n x kv_heads - 1
    Section query_rows;               // in q viewed as [n x kv_heads, group, width]
    Section query_starts;             // [lanes + 1] where each lane's begin among query_rows
    int64_t max_queries = 0;          // of a lane
    std::vector<Section> starts;      // by layer: [lanes + 1] first row in the pool, and an end
    std::vector<Section> lengths;     // by layer: [lanes] slots to read
    std::vector<int64_t> max_length;  // by layer
  };

  std::vector<int32_t> numbers;
  Section tokens, positions;     // [n]
  Section last;                  // rows whose logits are wanted
  std::vector<Section> written;  // by layer: [n x kv_heads] rows of the pool that K and V take
  std::vector<Section> rope_positions;  // by layer: [n x kv_heads]; those that are alike are shared
  std::vector<Call> calls;              // decoded rows, rows of prompts: those that there are
  // Before it lies what the forward reads, behind it what is read of it afterwards.
  int64_t read_by_forward = 0;
  std::vector<Section> taps;  // by block: rows that are looked at
  Section tap_order;          // what was taken, block by block, as [items][taps of the item]
};

// Precondition: rows of items follow one another from 0; the pool has fewer than 2^31 rows.
DevicePlan PlanDevice(absl::Span<const DeviceItem> items, const ModelShape& shape);

// Of decoded tokens, where the sections that the forward reads lie: plans of one layout differ in
// numbers alone.
struct PaddedLayout {
  int64_t rows = 0;          // of the forward; those behind the items' are nobody's
  int64_t max_length = 0;    // of all lanes: that of the longest at least
  bool one_position = true;  // a token has one RoPE position, whatever the layer
  auto operator<=>(const PaddedLayout&) const = default;
};

// As PlanDevice, of items that each have one decoded token; their rows count from 0. What the rows
// behind them write goes to the pool's row `spare`. `rows` and `max_length` of the layout are the
// caller's; `one_position` is set.
DevicePlan PlanPadded(absl::Span<const DeviceItem> items, int64_t spare, const ModelShape& shape,
                      PaddedLayout& layout);

}  // namespace epikv
