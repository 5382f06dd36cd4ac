#include "runtime/kernels/quantized_simd.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>

#include "policies/clones.h"
#include "runtime/base/processor.h"
#include "runtime/kernels/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/kernels/quantized_simd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace epikv {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

// Highway wants its baseline compiled. It is not used.
void MultiplyQuantized(const QuantizedRows&, const uint8_t*, const QuantizedShape&, float*) {
  std::abort();
}
void QuantizeRow(const float*, const QuantizedShape&, int8_t*, float*, int32_t*) { std::abort(); }

#else

namespace {

namespace hn = hwy::HWY_NAMESPACE;

#include "runtime/kernels/quantized_tiles.inc"

#if HWY_TARGET == HWY_AVX2

// The processor multiplies what has no sign by what has one, and adds pairs in 16 bits: they hold
// two products of 128 x 127.
template <int kBits>
EPIKV_INLINE Integers AddQuads(Integers sums, Quads weights, Quads values) {
  const __m256i pairs = kBits == 8 ? _mm256_maddubs_epi16(_mm256_abs_epi8(weights.raw),
                                                          _mm256_sign_epi8(values.raw, weights.raw))
                                   : _mm256_maddubs_epi16(weights.raw, values.raw);
  return hn::Add(sums, Integers{_mm256_madd_epi16(pairs, _mm256_set1_epi16(1))});
}

#else

template <int kBits>
EPIKV_INLINE Integers AddQuads(Integers sums, Quads weights, Quads values) {
  const int16x8_t low = vmull_s8(vget_low_s8(weights.raw), vget_low_s8(values.raw));
  const int16x8_t high = vmull_high_s8(weights.raw, values.raw);
  return hn::Add(sums, Integers(vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high))));
}

#endif

EPIKV_INLINE void QuantizeGroup(const float* x, int64_t group, int8_t* values, float* scale,
                                int32_t* sum) {
  const hn::RebindToFloat<Sums> floats;
  Integers most = hn::Zero(Sums());  // as bits, of which NaN's are above all others
  const Integers size = hn::Set(Sums(), 0x7fffffff);
  for (int64_t i = 0; i < group; i += kLanes) {
    const Integers bits = hn::BitCast(Sums(), hn::LoadU(floats, x + i));
    most = hn::Max(most, hn::And(bits, size));
  }
  const auto largest = std::bit_cast<float>(hn::GetLane(hn::MaxOfLanes(Sums(), most)));
  *scale = largest / 127;
  const auto by = hn::Set(floats, largest > kLeastRounded ? 127 / largest : 0);
  Integers sums = hn::Zero(Sums());
  for (int64_t i = 0; i < group; i += kLanes) {
    Integers rounded = hn::NearestInt(hn::Mul(hn::LoadU(floats, x + i), by));
    // What is no number becomes one end or the other, by compiler.
    rounded = hn::Min(hn::Max(rounded, hn::Set(Sums(), -128)), hn::Set(Sums(), 127));
    sums = hn::Add(sums, rounded);
    const hn::Rebind<int8_t, Sums> narrow;
    hn::StoreU(hn::DemoteTo(narrow, rounded), narrow, values + i);
  }
  *sum = hn::GetLane(hn::SumOfLanes(Sums(), sums));
}

}  // namespace

void MultiplyQuantized(const QuantizedRows& x, const uint8_t* block, const QuantizedShape& shape,
                       float* out) {
  shape.bits == 8 ? Multiply<8>(x, block, shape, out) : Multiply<4>(x, block, shape, out);
}

void QuantizeRow(const float* x, const QuantizedShape& shape, int8_t* values, float* scales,
                 int32_t* sums) {
  for (int64_t g = 0; g < shape.groups(); ++g) {
    QuantizeGroup(x + g * shape.group, shape.group, values + g * shape.group, scales + g, sums + g);
  }
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace epikv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#if HWY_TARGETS & HWY_NEON
HWY_PUSH_ATTRIBUTES("arch=armv8.2-a+crypto+dotprod")
namespace epikv {
namespace neon_dot {
namespace {

namespace hn = hwy::N_NEON;

#include "runtime/kernels/quantized_tiles.inc"

template <int kBits>
EPIKV_INLINE Integers AddQuads(Integers sums, Quads weights, Quads values) {
  return Integers(vdotq_s32(sums.raw, weights.raw, values.raw));
}

}  // namespace
}  // namespace neon_dot

void MultiplyBlockNeonDot(const QuantizedRows& x, const uint8_t* block, const QuantizedShape& shape,
                          float* out) {
  shape.bits == 8 ? neon_dot::Multiply<8>(x, block, shape, out)
                  : neon_dot::Multiply<4>(x, block, shape, out);
}

}  // namespace epikv
HWY_POP_ATTRIBUTES
#else
namespace epikv {

void MultiplyBlockNeonDot(const QuantizedRows&, const uint8_t*, const QuantizedShape&, float*) {
  std::abort();
}

}  // namespace epikv
#endif

namespace epikv {

void MultiplyBlockSimd(const QuantizedRows& x, const uint8_t* block, const QuantizedShape& shape,
                       float* out) {
  EPIKV_SIMD::MultiplyQuantized(x, block, shape, out);
}

void QuantizeRowSimd(const float* x, const QuantizedShape& shape, int8_t* values, float* scales,
                     int32_t* sums) {
  EPIKV_SIMD::QuantizeRow(x, shape, values, scales, sums);
}

}  // namespace epikv

#endif
