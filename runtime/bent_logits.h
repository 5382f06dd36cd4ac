#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

// What a layer's soft cap and window make of logits, and the exponential: for the inner loops of
// attention, which compile them for one processor or another.

#define EPIKV_INLINE inline __attribute__((always_inline))

namespace epikv {

// exp(x) for x <= 0 to 2 ulp: 2^n times a polynomial of the rest (Cephes expf). 0 below -87.
EPIKV_INLINE float ExpNegative(float x) {
  const float clamped = x < -87.0f ? -87.0f : x;
  const float n = std::floor(clamped * 1.44269504f + 0.5f);
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const float scale = std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
  return x < -87.0f ? 0.0f : p * scale;
}

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
