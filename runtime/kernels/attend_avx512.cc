#include "runtime/kernels/attend_avx512.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/base/processor.h"
#include "runtime/kernels/attend_blocks.h"
#include "runtime/kernels/bent_logits.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

// The compiler uses AVX512_BF16 and AMX only where it is asked to by name.
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,avx512bf16,amx-tile,amx-bf16")

#include "runtime/kernels/tiles.h"

namespace epikv {
namespace {

constexpr int kTile = 7;  // queries whose sums are in registers together

#include "runtime/kernels/attend_blocks.inc"

EPIKV_INLINE float SumOf(const float* mass) { return _mm512_reduce_add_ps(_mm512_load_ps(mass)); }

// exp(x) for x <= 0, as ExpNegative but for what is below -87, which is told from 0 by a denormal
// or not at all.
EPIKV_INLINE __m512 Exp(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-174.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

// Rows to columns: a 16 x 16 matrix of 32-bit elements, in place.
EPIKV_INLINE void Transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Transposes 16 rows, each of `row_bytes` and `words` words of 32 bits, those from `rows` on as
// zeros, and calls store(i, word i of each row).
template <class StoreWord>
EPIKV_INLINE void ForWords(const char* keys, int64_t row_bytes, int64_t rows, int64_t words,
                           const StoreWord& store) {
  for (int64_t begin = 0; begin < words; begin += kVector) {
    const int64_t count = std::min(kVector, words - begin);
    const auto mask = static_cast<__mmask16>((1 << count) - 1);
    const char* const first = keys + begin * sizeof(uint32_t);
    __m512i r[16];
    for (int64_t t = 0; t < kVector; ++t) {
      r[t] =
          t < rows ? _mm512_maskz_loadu_epi32(mask, first + t * row_bytes) : _mm512_setzero_si512();
    }
    Transpose(r);
    for (int64_t t = 0; t < count; ++t) store(begin + t, r[t]);
  }
}

EPIKV_INLINE __m512 FromBFloat16(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

// To the nearest, ties to even; NaN stays one.
EPIKV_INLINE __m256i ToBFloat16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(
      _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, _mm512_set1_epi32(0x7fc0)));
}

// How lanes of one dtype are multiplied. A word is what one product takes of a key, a query or a
// probability, 32 bits: an element in fp32, or two. Element: of queries and of what comes out;
// Cached: of the lanes' rows, behind which is a scale, where they are kScaled.

// Lanes widened to fp32.
struct OfFloat {
  static constexpr bool kTiles = false;
  static constexpr int64_t kKeys = 1;  // whose probabilities share a word
  static constexpr bool kScaled = false;
  using Element = float;
  using Cached = float;

  static int64_t Words(int64_t width) { return width; }
  EPIKV_INLINE static __m512 MulAdd(__m512 sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
  // 16 keys from `keys` on into column `column` of words [Words(width), kBlock].
  EPIKV_INLINE static void PackKeys(const char* keys, int64_t row_bytes, int64_t rows,
                                    int64_t width, uint32_t* column) {
    ForWords(
        keys, row_bytes, rows, width, [&](int64_t i, __m512i word) __attribute__((always_inline)) {
          _mm512_store_si512(column + i * kBlock, word);
        });
  }
  EPIKV_INLINE static __m512 Load(const float* p) { return _mm512_loadu_ps(p); }
  EPIKV_INLINE static void Store(float* p, __m512 x) { _mm512_storeu_ps(p, x); }
};

// Of elements of 16 bits: `Wide` says how they become fp32.
template <class Wide>
struct OfHalf : OfFloat {
  using Element = uint16_t;
  using Cached = uint16_t;

  EPIKV_INLINE static void PackKeys(const char* keys, int64_t row_bytes, int64_t rows,
                                    int64_t width, uint32_t* column) {
    ForWords(
        keys, row_bytes, rows,
        width / 2, [&](int64_t i, __m512i word) __attribute__((always_inline)) {
          uint32_t* const words = column + 2 * i * kBlock;
          _mm512_store_ps(words, Wide::Load(_mm512_cvtepi32_epi16(word)));
          _mm512_store_ps(words + kBlock,
                          Wide::Load(_mm512_cvtepi32_epi16(_mm512_srli_epi32(word, 16))));
        });
  }
  EPIKV_INLINE static __m512 Load(const uint16_t* p) {
    return Wide::Load(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  EPIKV_INLINE static void Store(uint16_t* p, __m512 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), Wide::Store(x));
  }
};

struct BFloat16 {
  EPIKV_INLINE static __m512 Load(__m256i x) { return FromBFloat16(x); }
  EPIKV_INLINE static __m256i Store(__m512 x) { return ToBFloat16(x); }
};

struct Float16 {
  EPIKV_INLINE static __m512 Load(__m256i x) { return _mm512_cvtph_ps(x); }
  EPIKV_INLINE static __m256i Store(__m512 x) {
    return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
};

// What queries, keys, probabilities and values become, for lanes that are widened.
template <class Of>
struct Widened : Of {
  using Element = typename Of::Element;

  static void PackQueries(const Element* queries, int64_t count, uint32_t* words) {
    for (int64_t i = 0; i < count; i += kVector) _mm512_store_ps(words + i, Of::Load(queries + i));
  }
  EPIKV_INLINE static void PackWeights(const __m512 weights[2], uint32_t* words) {
    for (int i = 0; i < 2; ++i) _mm512_store_ps(words + kVector * i, weights[i]);
  }
  template <int kVectors>
  EPIKV_INLINE static void LoadValues(const Element* row, const Element*, __m512i values[]) {
    for (int i = 0; i < kVectors; ++i) {
      values[i] = _mm512_castps_si512(Of::Load(row + kVector * i));
    }
  }
  // Sums [width] over their mass, as elements.
  EPIKV_INLINE static void Finish(const float* sums, float mass, int64_t width, Element* out) {
    const __m512 norm = _mm512_set1_ps(1.0f / mass);
    for (int64_t i = 0; i < width; i += kVector) {
      Of::Store(out + i, _mm512_mul_ps(norm, _mm512_load_ps(sums + i)));
    }
  }
};

// Lanes of bfloat16 as they are, two elements a word.
struct Paired {
  static constexpr bool kTiles = false;
  static constexpr int64_t kKeys = 2;
  static constexpr bool kScaled = false;
  using Element = uint16_t;
  using Cached = uint16_t;

  static int64_t Words(int64_t width) { return width / 2; }
  EPIKV_INLINE static __m512 MulAdd(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
  EPIKV_INLINE static void PackKeys(const char* keys, int64_t row_bytes, int64_t rows,
                                    int64_t width, uint32_t* column) {
    ForWords(
        keys, row_bytes, rows,
        width / 2, [&](int64_t i, __m512i word) __attribute__((always_inline)) {
          _mm512_store_si512(column + i * kBlock, word);
        });
  }
  static void PackQueries(const uint16_t* queries, int64_t count, uint32_t* words) {
    std::memcpy(words, queries, count * sizeof(uint16_t));
  }
  EPIKV_INLINE static void PackWeights(const __m512 weights[2], uint32_t* words) {
    _mm512_store_si512(words, (__m512i)_mm512_cvtne2ps_pbh(weights[1], weights[0]));
  }
  // Two rows interleaved, in the order that unpacking leaves: 4 of the first 8, then of the next
  // ..., and then the other 4 of each.
  template <int kVectors>
  EPIKV_INLINE static void LoadValues(const uint16_t* row, const uint16_t* next, __m512i values[]) {
    for (int i = 0; i < kVectors / 2; ++i) {
      const __m512i a = _mm512_loadu_si512(row + 2 * kVector * i);
      const __m512i b = _mm512_loadu_si512(next + 2 * kVector * i);
      values[2 * i] = _mm512_unpacklo_epi16(a, b);
      values[2 * i + 1] = _mm512_unpackhi_epi16(a, b);
    }
  }
  EPIKV_INLINE static void Finish(const float* sums, float mass, int64_t width, uint16_t* out) {
    const __m512 norm = _mm512_set1_ps(1.0f / mass);
    for (int64_t i = 0; i < width; i += 2 * kVector) {
      const __m512 low = _mm512_mul_ps(norm, _mm512_load_ps(sums + i));
      const __m512 high = _mm512_mul_ps(norm, _mm512_load_ps(sums + i + kVector));
      const __m512i first =
          _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
      const __m512i second =
          _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
      auto* const to = reinterpret_cast<__m256i*>(out + i);
      _mm256_storeu_si256(to, ToBFloat16(_mm512_permutex2var_ps(low, first, high)));
      _mm256_storeu_si256(to + 1, ToBFloat16(_mm512_permutex2var_ps(low, second, high)));
    }
  }
};

// Lanes of int8, whose elements fp32 and bfloat16 hold exactly. Their scales are not theirs: K's
// are multiplied into logits, V's into probabilities.

// Element `i` of each word's four, in fp32.
EPIKV_INLINE __m512 FromInt8(__m512i word, int i) {
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(word, 24 - 8 * i), 24));
}
EPIKV_INLINE __m512 FromInt8(const int8_t* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// As a pair of bfloat16, of which they have no digit more.
EPIKV_INLINE __m512i Pair(__m512 low, __m512 high) {
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low), 16),
                         _mm512_castps_si512(high));
}

template <class Of>
struct WidenedInt8 : Widened<Of> {
  static constexpr bool kScaled = true;
  using Cached = int8_t;

  EPIKV_INLINE static void PackKeys(const char* keys, int64_t row_bytes, int64_t rows,
                                    int64_t width, uint32_t* column) {
    ForWords(
        keys, row_bytes, rows,
        width / 4, [&](int64_t i, __m512i word) __attribute__((always_inline)) {
          for (int part = 0; part < 4; ++part) {
            _mm512_store_ps(column + (4 * i + part) * kBlock, FromInt8(word, part));
          }
        });
  }
  template <int kVectors>
  EPIKV_INLINE static void LoadValues(const int8_t* row, const int8_t*, __m512i values[]) {
    for (int i = 0; i < kVectors; ++i) {
      values[i] = _mm512_castps_si512(FromInt8(row + kVector * i));
    }
  }
};

struct PairedInt8 : Paired {
  static constexpr bool kScaled = true;
  using Cached = int8_t;

  EPIKV_INLINE static void PackKeys(const char* keys, int64_t row_bytes, int64_t rows,
                                    int64_t width, uint32_t* column) {
    ForWords(
        keys, row_bytes, rows,
        width / 4, [&](int64_t i, __m512i word) __attribute__((always_inline)) {
          uint32_t* const words = column + 2 * i * kBlock;
          _mm512_store_si512(words, Pair(FromInt8(word, 0), FromInt8(word, 1)));
          _mm512_store_si512(words + kBlock, Pair(FromInt8(word, 2), FromInt8(word, 3)));
        });
  }
  // Two rows interleaved, in order.
  template <int kVectors>
  EPIKV_INLINE static void LoadValues(const int8_t* row, const int8_t* next, __m512i values[]) {
    for (int i = 0; i < kVectors; ++i) {
      values[i] = Pair(FromInt8(row + kVector * i), FromInt8(next + kVector * i));
    }
  }
  EPIKV_INLINE static void Finish(const float* sums, float mass, int64_t width, uint16_t* out) {
    Widened<OfHalf<BFloat16>>::Finish(sums, mass, width, out);
  }
};

// Pairs as a matrix unit multiplies them. A block has as many keys as a product takes pairs of.
template <class Pairs>
struct Tiled : Pairs {
  static constexpr bool kTiles = true;
  static_assert(kBlock == kTileBytes / 2 && kQueriesOfTile == kTileRows);

  // queries [count, words], keys [words, kBlock] -> logits [count, kBlock], scaled.
  static void Logits(const uint32_t* queries, int64_t count, const uint32_t* keys, int64_t words,
                     float scale, const Scales& scales, float* logits) {
    constexpr int64_t kStep = kTileBytes / 4;  // words
    constexpr int64_t kRow = kBlock * 4;       // bytes
    TileFence();
    for (int64_t g = 0; g < count; g += kTileRows) {
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t w = 0; w < words; w += kStep) {
        _tile_loadd(4, queries + g * words + w, words * 4);
        _tile_loadd(5, keys + w * kBlock, kRow);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, keys + w * kBlock + kVector, kRow);
        _tile_dpbf16ps(1, 4, 6);
      }
      _tile_stored(0, logits + g * kBlock, kRow);
      _tile_stored(1, logits + g * kBlock + kVector, kRow);
    }
    __m512 factors[2] = {_mm512_set1_ps(scale), _mm512_set1_ps(scale)};
    if constexpr (Pairs::kScaled) {
      factors[0] = _mm512_mul_ps(factors[0], _mm512_load_ps(scales.of));
      factors[1] = _mm512_mul_ps(factors[1], _mm512_load_ps(scales.of + kVector));
    }
    for (float* of = logits; of < logits + count * kBlock; of += kBlock) {
      _mm512_store_ps(of, _mm512_mul_ps(_mm512_load_ps(of), factors[0]));
      _mm512_store_ps(of + kVector, _mm512_mul_ps(_mm512_load_ps(of + kVector), factors[1]));
    }
  }

  // Values of two keys side by side, in the order of Pairs::LoadValues; zeros behind the last.
  static void PackValues(const char* values, int64_t row_bytes, const Ahead& ahead, int64_t count,
                         int64_t width, uint32_t* words) {
    using Cached = typename Pairs::Cached;
    for (int64_t j = 0; j < kBlock; j += 2, words += width) {
      if (j >= count) {
        std::memset(words, 0, width * sizeof(uint32_t));
        continue;
      }
      ahead.Fetch(j);
      ahead.Fetch(j + 1);
      const auto* const row = reinterpret_cast<const Cached*>(values + j * row_bytes);
      const auto* const next =
          j + 1 < count ? reinterpret_cast<const Cached*>(values + (j + 1) * row_bytes) : row;
      for (int64_t i = 0; i < width; i += 2 * kVector) {
        __m512i pairs[2];
        Pairs::template LoadValues<2>(row + i, next + i, pairs);
        _mm512_store_si512(words + i, pairs[0]);
        _mm512_store_si512(words + i + kVector, pairs[1]);
      }
    }
  }

  // sums [count, width] += weights [count, kBlock / 2] values.
  static void AddValues(const uint32_t* weights, int64_t count, const uint32_t* values,
                        int64_t width, float* sums) {
    TileFence();
    for (int64_t i = 0; i < width; i += kVector) {
      _tile_loadd(5, values + i, width * 4);
      for (int64_t g = 0; g < count; g += kTileRows) {
        _tile_loadd(0, sums + g * width + i, width * 4);
        _tile_loadd(4, weights + g * kBlock / 2, kTileBytes);
        _tile_dpbf16ps(0, 4, 5);
        _tile_stored(0, sums + g * width + i, width * 4);
      }
    }
  }
};

template <class As, int kQueries>
EPIKV_INLINE void Logits(const uint32_t* queries, const uint32_t* keys, int64_t words, float scale,
                         const Scales& scales, float* logits) {
  // Four sums one after another, added at the end, lose fewer digits than one.
  const int64_t part = (words + 3) / 4;
  __m512 low[kQueries], high[kQueries];
  for (int g = 0; g < kQueries; ++g) low[g] = high[g] = _mm512_setzero_ps();
  for (int64_t begin = 0; begin < words; begin += part) {
    __m512 low_part[kQueries], high_part[kQueries];
    for (int g = 0; g < kQueries; ++g) low_part[g] = high_part[g] = _mm512_setzero_ps();
    for (int64_t i = begin; i < std::min(words, begin + part); ++i) {
      const __m512i k0 = _mm512_load_si512(keys + i * kBlock);
      const __m512i k1 = _mm512_load_si512(keys + i * kBlock + kVector);
      for (int g = 0; g < kQueries; ++g) {
        const __m512i q = _mm512_set1_epi32(static_cast<int>(queries[g * words + i]));
        low_part[g] = As::MulAdd(low_part[g], k0, q);
        high_part[g] = As::MulAdd(high_part[g], k1, q);
      }
    }
    for (int g = 0; g < kQueries; ++g) {
      low[g] = _mm512_add_ps(low[g], low_part[g]);
      high[g] = _mm512_add_ps(high[g], high_part[g]);
    }
  }
  __m512 low_factor = _mm512_set1_ps(scale), high_factor = low_factor;
  if constexpr (As::kScaled) {
    low_factor = _mm512_mul_ps(low_factor, _mm512_load_ps(scales.of));
    high_factor = _mm512_mul_ps(high_factor, _mm512_load_ps(scales.of + kVector));
  }
  for (int g = 0; g < kQueries; ++g) {
    _mm512_store_ps(logits + g * kBlock, _mm512_mul_ps(low[g], low_factor));
    _mm512_store_ps(logits + g * kBlock + kVector, _mm512_mul_ps(high[g], high_factor));
  }
}

// AddValues of kVectors x 16 columns.
template <class As, int kQueries, int kVectors>
EPIKV_INLINE void AddColumns(const uint32_t* weights, const char* values, int64_t row_bytes,
                             const Ahead& ahead, int64_t count, int64_t width, float* sums) {
  __m512 sum[kQueries][kVectors];
  for (int g = 0; g < kQueries; ++g) {
    for (int i = 0; i < kVectors; ++i) sum[g][i] = _mm512_load_ps(sums + g * width + kVector * i);
  }
  for (int64_t j = 0; j < count; j += As::kKeys) {
    for (int64_t k = 0; k < As::kKeys; ++k) ahead.Fetch(j + k);
    const char* const row = values + j * row_bytes;
    const char* const next = j + 1 < count ? row + row_bytes : row;
    __m512i value[kVectors];
    As::template LoadValues<kVectors>(reinterpret_cast<const typename As::Cached*>(row),
                                      reinterpret_cast<const typename As::Cached*>(next), value);
    for (int g = 0; g < kQueries; ++g) {
      const __m512i weight =
          _mm512_set1_epi32(static_cast<int>(weights[(g * kBlock + j) / As::kKeys]));
      for (int i = 0; i < kVectors; ++i) sum[g][i] = As::MulAdd(sum[g][i], value[i], weight);
    }
  }
  for (int g = 0; g < kQueries; ++g) {
    for (int i = 0; i < kVectors; ++i) _mm512_store_ps(sums + g * width + kVector * i, sum[g][i]);
  }
}

template <class As, int kQueries>
EPIKV_INLINE void AddValues(const uint32_t* weights, const char* values, int64_t row_bytes,
                            Ahead ahead, int64_t count, int64_t width, float* sums) {
  int64_t column = 0;
  const auto add = [&](auto vectors) __attribute__((always_inline)) {
    constexpr int kVectors = decltype(vectors)::value;
    for (; column + kVector * kVectors <= width; column += kVector * kVectors) {
      AddColumns<As, kQueries, kVectors>(
          weights, values + column * static_cast<int64_t>(sizeof(typename As::Cached)), row_bytes,
          ahead, count, width, sums + column);
      ahead.row_bytes = 0;  // once
    }
  };
  add(std::integral_constant<int, 4>());
  add(std::integral_constant<int, 2>());
  if constexpr (As::kKeys == 1) add(std::integral_constant<int, 1>());
}

template <class As>
EPIKV_INLINE void Weigh(const Scratch<As>& s, int64_t g, int64_t value_width,
                        const Scales& scales) {
  const float* const logit = s.logits + g * kBlock;
  float* const mass = s.mass + g * kVector;
  __m512 x[2] = {_mm512_load_ps(logit), _mm512_load_ps(logit + kVector)};
  const __m512 peak = _mm512_set1_ps(s.peak[g]);
  if ((_mm512_cmp_ps_mask(x[0], peak, _CMP_GT_OQ) | _mm512_cmp_ps_mask(x[1], peak, _CMP_GT_OQ)) !=
      0) {  // rare behind the first blocks
    const float top = _mm512_reduce_max_ps(_mm512_max_ps(x[0], x[1]));
    const __m512 shrink = Exp(_mm512_set1_ps(s.peak[g] - top));
    float* const sums = s.sums + g * value_width;
    for (int64_t i = 0; i < value_width; i += kVector) {
      _mm512_store_ps(sums + i, _mm512_mul_ps(shrink, _mm512_load_ps(sums + i)));
    }
    _mm512_store_ps(mass, _mm512_mul_ps(shrink, _mm512_load_ps(mass)));
    s.peak[g] = top;
  }
  if (s.peak[g] == -INFINITY) {  // nothing is seen yet
    x[0] = x[1] = _mm512_setzero_ps();
    return As::PackWeights(x, s.weights + g * kBlock / As::kKeys);
  }
  for (__m512& weight : x) weight = Exp(_mm512_sub_ps(weight, _mm512_set1_ps(s.peak[g])));
  _mm512_store_ps(mass, _mm512_add_ps(_mm512_load_ps(mass), _mm512_add_ps(x[0], x[1])));
  if constexpr (As::kScaled) {
    for (int i = 0; i < 2; ++i) x[i] = _mm512_mul_ps(x[i], _mm512_load_ps(scales.of + kVector * i));
  }
  As::PackWeights(x, s.weights + g * kBlock / As::kKeys);
}

template <template <class> class As>
void AttendAs(const PrefillLane& lane, const LaneShape& shape, float* left, float* scratch) {
  switch (shape.dtype) {
    case DType::kFloat32:
      return Attend<As<OfFloat>>(lane, shape, left, scratch);
    case DType::kBFloat16:
      return Attend<As<OfHalf<BFloat16>>>(lane, shape, left, scratch);
    case DType::kFloat16:
      return Attend<As<OfHalf<Float16>>>(lane, shape, left, scratch);
  }
}

}  // namespace

void AttendAvx512(const PrefillLane& lane, const LaneShape& shape, float* left, float* scratch) {
  if (shape.stored == KvDType::kInt8) return AttendAs<WidenedInt8>(lane, shape, left, scratch);
  AttendAs<Widened>(lane, shape, left, scratch);
}

void AttendAvx512BFloat16(const PrefillLane& lane, const LaneShape& shape, float* left,
                          float* scratch) {
  if (shape.stored == KvDType::kInt8) return Attend<PairedInt8>(lane, shape, left, scratch);
  Attend<Paired>(lane, shape, left, scratch);
}

void AttendAmx(const PrefillLane& lane, const LaneShape& shape, float* left, float* scratch) {
  const TileScope scope(kTileRows);
  if (shape.stored == KvDType::kInt8) return Attend<Tiled<PairedInt8>>(lane, shape, left, scratch);
  Attend<Tiled<Paired>>(lane, shape, left, scratch);
}

}  // namespace epikv

#pragma GCC pop_options

namespace epikv {

bool CanAttendAvx512(const LaneShape& shape) {
  return ThisProcessor().avx512 && CanAttendBlocks(shape);
}

bool CanAttendAvx512BFloat16(const LaneShape& shape) {
  return ThisProcessor().avx512_bf16 && CanAttendBlocks(shape) && shape.dtype == DType::kBFloat16 &&
         shape.value_width % (2 * kKeysOfVector) == 0;
}

bool CanAttendAmx(const LaneShape& shape) {
  return ThisProcessor().amx_bf16 && CanAttendAvx512BFloat16(shape) &&
         shape.key_width % (2 * kKeysOfVector) == 0;
}

}  // namespace epikv

#else

namespace epikv {

bool CanAttendAvx512(const LaneShape&) { return false; }
bool CanAttendAvx512BFloat16(const LaneShape&) { return false; }
bool CanAttendAmx(const LaneShape&) { return false; }
void AttendAvx512(const PrefillLane&, const LaneShape&, float*, float*) {}
void AttendAvx512BFloat16(const PrefillLane&, const LaneShape&, float*, float*) {}
void AttendAmx(const PrefillLane&, const LaneShape&, float*, float*) {}

}  // namespace epikv

#endif
