#pragma once

#include <bit>
#include <cstdint>

#include "policies/clones.h"
#include "runtime/base/float16.h"

// Elements of each DType and how they become fp32 and back, for inner loops on raw memory.

namespace epikv {

// Elements of the narrow dtypes.
struct BFloat16 {
  uint16_t bits;
};
#if defined(__aarch64__)
using Float16 = __fp16;  // GCC before 13 has no _Float16 there
EPIKV_INLINE float Load(const Float16* p) { return static_cast<float>(*p); }
EPIKV_INLINE void Store(Float16* p, float x) { *p = static_cast<Float16>(x); }
#elif defined(__clang__) && __clang_major__ < 15
struct Float16 {
  uint16_t bits;
};
EPIKV_INLINE float Load(const Float16* p) { return WidenFloat16(p->bits); }
EPIKV_INLINE void Store(Float16* p, float x) { p->bits = NarrowFloat16(x); }
#else
using Float16 = _Float16;
EPIKV_INLINE float Load(const Float16* p) { return static_cast<float>(*p); }
EPIKV_INLINE void Store(Float16* p, float x) { *p = static_cast<Float16>(x); }
#endif

EPIKV_INLINE float Load(const float* p) { return *p; }
EPIKV_INLINE float Load(const BFloat16* p) {
  return std::bit_cast<float>(static_cast<uint32_t>(p->bits) << 16);
}
// To the nearest, ties to even.
EPIKV_INLINE void Store(float* p, float x) { *p = x; }
EPIKV_INLINE void Store(BFloat16* p, float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  p->bits = static_cast<uint16_t>(x != x ? 0x7fc0 : rounded);
}

template <class T>
EPIKV_INLINE void Widen(const T* in, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = Load(in + i);
}

}  // namespace epikv
