#include "runtime/kernels/quantized_avx2.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#include "policies/clones.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

namespace epikv {

bool HasAvx2QuantizedProducts() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

#pragma GCC push_options
#pragma GCC target("avx2,fma")

namespace {

constexpr int64_t kBlock = kQuantizedBlock;
constexpr int kLanes = 8;  // outputs of a vector
constexpr int kVectors = kBlock / kLanes;
constexpr int64_t kQuad = 4;
constexpr int64_t kQuadBytes = kBlock * kQuad;  // of a quad of 8 bits; of two of 4
// Tiles of rows and vectors whose sums are in registers together, of which there are 16.
constexpr int kRows = 4, kWidth = 2;

// What is read next, of which some lines are fetched with each step of a tile.
struct Ahead {
  const uint8_t* lines;
  int64_t per_step;

  EPIKV_INLINE void Fetch() {
    for (int64_t i = 0; i < per_step; ++i) _mm_prefetch(lines + i * 64, _MM_HINT_T1);
    lines += per_step * 64;
  }
};

// Four inputs of eight outputs. Of 8 bits as signed integers, of 4 as they stand above 0.
template <int kBits>
EPIKV_INLINE __m256i LoadQuads(const uint8_t* integers, int quad, int vector) {
  const uint8_t* const from = integers + vector * 32;
  if constexpr (kBits == 8) {
    const auto* const at = reinterpret_cast<const __m256i*>(from + quad * kQuadBytes);
    return _mm256_xor_si256(_mm256_loadu_si256(at), _mm256_set1_epi8(static_cast<char>(0x80)));
  }
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm256_and_si256(quad == 0 ? both : _mm256_srli_epi16(both, 4), _mm256_set1_epi8(0xf));
}

// Adds four inputs' products. The processor multiplies what has no sign by what has one, and adds
// pairs in 16 bits: they hold two products of 128 x 127.
template <int kBits>
EPIKV_INLINE __m256i AddQuads(__m256i sums, __m256i weights, __m256i values) {
  const __m256i pairs =
      kBits == 8 ? _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(values, weights))
                 : _mm256_maddubs_epi16(weights, values);
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

EPIKV_INLINE void Scale(__m256i sums, const uint16_t* scales, __m256 of_row, bool first,
                        float* out) {
  const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
  const __m256 scale = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
  const __m256 before = first ? _mm256_setzero_ps() : _mm256_loadu_ps(out);
  _mm256_storeu_ps(out,
                   _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), _mm256_mul_ps(scale, of_row), before));
}

// One group's part of kOfWidth vectors of a block's outputs, from vector `v` on, for kOfRows rows.
template <int kBits, int kOfRows, int kOfWidth>
EPIKV_INLINE void MultiplyTile(const QuantizedRows& x, int64_t row, int64_t v, int64_t g,
                               const uint8_t* group, const QuantizedShape& shape, Ahead& ahead,
                               float* out) {
  constexpr int kQuads = 2;  // at a time: what one load holds of 4 bits
  const int64_t groups = shape.groups(), stride = shape.inputs;
  __m256i sums[kOfRows][kOfWidth];
#pragma GCC unroll 4
  for (int r = 0; r < kOfRows; ++r) {
    // What 4 bits stand above, of all inputs.
    const int32_t above = kBits == 8 ? 0 : -8 * x.sums[(row + r) * groups + g];
#pragma GCC unroll 8
    for (int w = 0; w < kOfWidth; ++w) sums[r][w] = _mm256_set1_epi32(above);
  }
  const uint8_t* integers = group + kBlock * sizeof(uint16_t) + v * 32;
  const int8_t* values = x.values + row * stride + g * shape.group;
  const int8_t* const end = values + shape.group;
  for (; values < end; values += kQuads * kQuad, integers += kQuadBytes * kBits / 4) {
    ahead.Fetch();
#pragma GCC unroll 2
    for (int q = 0; q < kQuads; ++q) {
      __m256i weights[kOfWidth];
#pragma GCC unroll 8
      for (int w = 0; w < kOfWidth; ++w) weights[w] = LoadQuads<kBits>(integers, q, w);
#pragma GCC unroll 4
      for (int r = 0; r < kOfRows; ++r) {
        int32_t four = 0;
        std::memcpy(&four, values + r * stride + q * kQuad, sizeof(four));
        const __m256i quad = _mm256_set1_epi32(four);
#pragma GCC unroll 8
        for (int w = 0; w < kOfWidth; ++w) {
          sums[r][w] = AddQuads<kBits>(sums[r][w], weights[w], quad);
        }
      }
    }
  }
  const auto* const scales = reinterpret_cast<const uint16_t*>(group) + v * kLanes;
#pragma GCC unroll 4
  for (int r = 0; r < kOfRows; ++r) {
    const __m256 of_row = _mm256_set1_ps(x.scales[(row + r) * groups + g]);
    float* const to = out + (row + r) * kBlock + v * kLanes;
#pragma GCC unroll 8
    for (int w = 0; w < kOfWidth; ++w) {
      Scale(sums[r][w], scales + w * kLanes, of_row, g == 0, to + w * kLanes);
    }
  }
}

template <int kBits>
void Multiply(const QuantizedRows& x, const uint8_t* block, const QuantizedShape& shape,
              float* out) {
  constexpr int64_t kAhead = 32 << 10;  // bytes
  const int64_t bytes = kBlock * (static_cast<int64_t>(sizeof(uint16_t)) + shape.group * kBits / 8);
  const bool one = x.rows == 1;
  const int64_t tiles = one ? 1 : (x.rows + kRows - 1) / kRows * (kVectors / kWidth);
  const int64_t steps = tiles * (shape.group / 8), lines = bytes / 64;
  for (int64_t g = 0; g < shape.groups(); ++g) {
    const uint8_t* const group = block + g * bytes;
    Ahead ahead = {group + kAhead, (lines + steps - 1) / steps};
    if (one) {
      MultiplyTile<kBits, 1, kVectors>(x, 0, 0, g, group, shape, ahead, out);
      continue;
    }
    for (int64_t v = 0; v < kVectors; v += kWidth) {
      int64_t row = 0;
      for (; row + kRows <= x.rows; row += kRows) {
        MultiplyTile<kBits, kRows, kWidth>(x, row, v, g, group, shape, ahead, out);
      }
      switch (x.rows - row) {
        case 3:
          MultiplyTile<kBits, 3, kWidth>(x, row, v, g, group, shape, ahead, out);
          break;
        case 2:
          MultiplyTile<kBits, 2, kWidth>(x, row, v, g, group, shape, ahead, out);
          break;
        case 1:
          MultiplyTile<kBits, 1, kWidth>(x, row, v, g, group, shape, ahead, out);
          break;
        default:
          break;
      }
    }
  }
}

EPIKV_INLINE int32_t Largest(__m256i of) {
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128(of), _mm256_extracti128_si256(of, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
  return _mm_cvtsi128_si32(half);
}
EPIKV_INLINE int32_t SumOf(__m256i of) {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(of), _mm256_extracti128_si256(of, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1));
  return _mm_cvtsi128_si32(half);
}

EPIKV_INLINE void QuantizeGroup(const float* x, int64_t group, int8_t* values, float* scale,
                                int32_t* sum) {
  __m256i most = _mm256_setzero_si256();  // as bits, of which NaN's are above all others
  const __m256i size = _mm256_set1_epi32(0x7fffffff);
  for (int64_t i = 0; i < group; i += kLanes) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    most = _mm256_max_epi32(most, _mm256_and_si256(bits, size));
  }
  const auto largest = std::bit_cast<float>(Largest(most));
  *scale = largest / 127;
  const __m256 by = _mm256_set1_ps(largest > 0 ? 127 / largest : 0);
  const __m256i least = _mm256_set1_epi32(-128);
  __m256i sums = _mm256_setzero_si256();
  for (int64_t i = 0; i < group; i += kLanes) {
    __m256i rounded = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), by));
    rounded = _mm256_max_epi32(rounded, least);  // of what is no number
    sums = _mm256_add_epi32(sums, rounded);
    const __m128i narrow =
        _mm_packs_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(values + i), _mm_packs_epi16(narrow, narrow));
  }
  *sum = SumOf(sums);
}

}  // namespace

void MultiplyBlockAvx2(const QuantizedRows& x, const uint8_t* block, const QuantizedShape& shape,
                       float* out) {
  shape.bits == 8 ? Multiply<8>(x, block, shape, out) : Multiply<4>(x, block, shape, out);
}

void QuantizeRowAvx2(const float* x, const QuantizedShape& shape, int8_t* values, float* scales,
                     int32_t* sums) {
  for (int64_t g = 0; g < shape.groups(); ++g) {
    QuantizeGroup(x + g * shape.group, shape.group, values + g * shape.group, scales + g, sums + g);
  }
}

#pragma GCC pop_options

}  // namespace epikv

#else

namespace epikv {

bool HasAvx2QuantizedProducts() { return false; }
void MultiplyBlockAvx2(const QuantizedRows&, const uint8_t*, const QuantizedShape&, float*) {
  std::abort();
}
void QuantizeRowAvx2(const float*, const QuantizedShape&, int8_t*, float*, int32_t*) {
  std::abort();
}

}  // namespace epikv

#endif
