#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

// How inner loops on raw memory are compiled for the processor found at start-up, and the
// exponential for them. Without torch: the runtime's loops include it, too.

// Sanitizers run before the loader can pick a clone.
#if defined(EPIKV_SANITIZED) || !defined(__x86_64__) || !defined(__GNUC__) || defined(__clang__)
#define EPIKV_CLONES
#else
#define EPIKV_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
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

}  // namespace epikv
