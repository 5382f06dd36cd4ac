#pragma once

#include <cmath>
#include <cstdint>

#include "absl/types/span.h"
#include "policies/clones.h"
#include "runtime/kernels/kernels.h"

// What a layer's soft cap and window make of logits: for the inner loops of attention, which
// compile them for one processor or another.

namespace epikv {

// cap * tanh(x / cap), to 3e-7 of cap.
EPIKV_INLINE float Capped(float x, float cap) {
  const float y = std::fabs(x) / cap, square = y * y;
  const float e = ExpNegative(-2.0f * y);
  // Near 0 the quotient has lost its digits: there, the series.
  const float series =
      y * (1 + square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315))));
  return std::copysign(cap * (y < 0.2f ? series : (1 - e) / (1 + e)), x);
}

// Where a lane's tokens are, and from where on a query sees them: DecodeLane's, PrefillLane's.
struct Window {
  const int64_t* positions = nullptr;  // null: everything is seen
  int64_t first_seen = 0;

  EPIKV_INLINE bool SeesAny(int64_t begin, int64_t count) const {
    if (positions == nullptr) return true;
    for (int64_t j = begin; j < begin + count; ++j) {
      if (positions[j] >= first_seen) return true;
    }
    return false;
  }
};

// Logits of slots [begin, begin + count) as the layer's soft cap (0: none) and window leave them.
EPIKV_INLINE void Bend(const Window& window, float soft_cap, int64_t begin, int64_t count,
                       float* logit) {
  if (soft_cap > 0) {
    for (int64_t j = 0; j < count; ++j) logit[j] = Capped(logit[j], soft_cap);
  }
  if (window.positions == nullptr) return;
  const int64_t* const position = window.positions + begin;
  for (int64_t j = 0; j < count; ++j) {
    logit[j] = position[j] < window.first_seen ? -INFINITY : logit[j];
  }
}

// What a loop over a lane of `used` slots runs over.
struct ReadsOf {
  const SlotRange all;
  const absl::Span<const SlotRange> reads;

  ReadsOf(absl::Span<const SlotRange> given, int64_t used)
      : all{0, used}, reads(given.empty() ? absl::Span<const SlotRange>(&all, 1) : given) {}
  ReadsOf(const ReadsOf&) = delete;
};

// The logits, [group, used], of those of `slots` that are not read: before a loop over those that
// are.
EPIKV_INLINE void LeaveUnread(float* logits, absl::Span<const SlotRange> reads, int64_t group,
                              int64_t used, SlotRange slots) {
  if (logits == nullptr || reads.empty()) return;
  for (int64_t g = 0; g < group; ++g) {
    for (int64_t j = slots.begin; j < slots.end; ++j) logits[g * used + j] = -INFINITY;
  }
}

// The logits, [group, used], of a block that no query sees.
EPIKV_INLINE void LeaveUnseen(float* logits, int64_t group, int64_t used, int64_t begin,
                              int64_t count) {
  if (logits == nullptr) return;
  for (int64_t g = 0; g < group; ++g) {
    float* const of_block = logits + g * used + begin;
    for (int64_t j = 0; j < count; ++j) of_block[j] = -INFINITY;
  }
}

}  // namespace epikv
