#include "runtime/kv/kv_layout.h"

#include <algorithm>
#include <numeric>

#include "runtime/kernels/page_bounds.h"
#include "runtime/kv/page_index.h"
#include "runtime/signals/signals.h"

namespace epikv {

KvLayout LayoutOf(const ModelShape& shape, const KvFormat& format, const PolicyTraits& traits,
                  int64_t num_tap_layers, PositionMode positions, const ReadLimit& read,
                  int64_t guess_tokens) {
  const int64_t element = ElementBytes(format.model), key_bytes = format.RowBytes(shape.key_width);
  KvLayout layout;
  layout.num_lanes = shape.num_layers * shape.num_kv_heads;
  layout.row_bytes = key_bytes + format.RowBytes(shape.value_width);
  layout.num_tables = traits.granularity == Granularity::kToken   ? 1
                      : traits.granularity == Granularity::kLayer ? shape.num_layers
                                                                  : layout.num_lanes;
  layout.slot_bytes = 2 * sizeof(int32_t) + traits.columns.size() * sizeof(float);
  layout.state_bytes_per_token = traits.state_bytes_per_token;
  const int64_t steps = 1 + guess_tokens;  // at once
  // The probabilities that a step's query gave each slot.
  if (traits.signals.Has(Signal::kAttentionRow) || traits.signals.Has(Signal::kPromptAttention)) {
    const int64_t layers = traits.attention_layers.empty()
                               ? shape.num_layers
                               : static_cast<int64_t>(traits.attention_layers.size());
    const int64_t rows = traits.signals.Has(Signal::kAttentionRow) ? steps : 1;
    layout.state_bytes_per_token += rows * layers * shape.num_kv_heads * sizeof(float);
  }
  // The logits of one layer that a decode row is made of.
  if (traits.signals.Has(Signal::kAttentionRow)) {
    layout.state_bytes_per_token += steps * shape.num_heads * sizeof(float);
  }
  // The keys of one layer, turned.
  if (positions == PositionMode::kCache) {
    layout.state_bytes_per_token += shape.num_kv_heads * key_bytes;
  }
  // Residuals after every block, until the last one is there.
  if (traits.signals.Has(Signal::kResidualDistance)) {
    layout.step_bytes_per_row = shape.num_layers * shape.hidden_size * element;
  }
  // What the gate says of each row: by layer, of all, and as the policy is told.
  if (traits.signals.Has(Signal::kGate)) {
    layout.step_bytes_per_row +=
        3 * layout.num_lanes * traits.gate_numbers * static_cast<int64_t>(sizeof(float));
  }
  // As the final norm leaves each row, in fp32, and as the policy is told.
  if (traits.signals.Has(Signal::kFinalHidden)) {
    layout.step_bytes_per_row +=
        shape.hidden_size * (element + 2 * static_cast<int64_t>(sizeof(float)));
  }
  // The residual before, and those of steps that are not yet committed.
  layout.state_bytes = traits.state_bytes + (1 + steps) * num_tap_layers * shape.hidden_size * 4 +
                       (traits.signals.Has(Signal::kQueryMoments)
                            ? QueryMomentsBytes(shape.num_layers, shape.num_heads, shape.key_width)
                            : 0) +
                       QueryWindow::Bytes(shape.num_layers, traits.window,
                                          shape.num_heads * shape.key_width * element);
  const int64_t query_row = shape.num_layers * shape.num_heads * shape.key_width;
  if (traits.signals.Has(Signal::kQueryMoments)) {
    layout.state_bytes += guess_tokens * query_row * static_cast<int64_t>(sizeof(float));
  }
  if (traits.window > 0) layout.state_bytes += guess_tokens * query_row * element;
  const int64_t pass_queries =
      traits.pass.chunk > 0 ? ScratchPass::kStepTokens : traits.pass.lookahead;
  if (read.tokens > 0) {
    layout.bound_bytes = PageIndex::BytesPerToken(read.rule.page, shape.key_width, format.model);
    layout.state_bytes += layout.num_lanes * PageIndex::BytesPerLane(shape.key_width, format.model);
  }
  layout.pass_bytes = QueryWindow::Bytes(shape.num_layers, pass_queries,
                                         shape.num_heads * shape.key_width * element);
  return layout;
}

int64_t TierBytes(const KvLayout& layout, const ModelShape& shape, const TierFormat& format,
                  int64_t tokens) {
  // By token: its place, which is kept by index and in order, in nodes of the standard library's.
  constexpr int64_t kBytesOfToken = 192;
  const int64_t pages = (tokens + kTierPage - 1) / kTierPage;
  return layout.num_tables * tokens * (layout.slot_bytes + kBytesOfToken) +
         layout.num_lanes *
             (tokens * (format.RowBytes(shape.key_width) + format.RowBytes(shape.value_width)) +
              pages * PageBoundsBytes(shape.key_width, format.pool.model));
}

int64_t MostPacketBytes(const KvLayout& layout, const Request& request) {
  const std::vector<int64_t>& rows = request.demand.decode;
  return std::reduce(rows.begin(), rows.end()) *
             (layout.row_bytes + 2 * static_cast<int64_t>(sizeof(int32_t))) +
         (request.prefill_tokens() + request.max_output_tokens) *
             static_cast<int64_t>(sizeof(int32_t));
}

int64_t BytesOf(const KvLayout& layout, const std::vector<int64_t>& capacities) {
  const int64_t lanes_per_table = layout.num_lanes / layout.num_tables;
  int64_t bytes = layout.state_bytes, longest = 0;
  for (int64_t table = 0; table < layout.num_tables; ++table) {
    int64_t slots = 0;
    for (int64_t lane = table * lanes_per_table; lane < (table + 1) * lanes_per_table; ++lane) {
      bytes += capacities[lane] * (layout.row_bytes + layout.bound_bytes);
      slots = std::max(slots, capacities[lane]);
    }
    bytes += slots * layout.slot_bytes;
    longest = std::max(longest, slots);
  }
  return bytes + longest * layout.state_bytes_per_token;
}

}  // namespace epikv
