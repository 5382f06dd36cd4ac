#include "runtime/kernels/dense_avx2.h"

#include <algorithm>
#include <cstdlib>
#include <type_traits>
#include <utility>

#include "policies/clones.h"
#include "runtime/kernels/dense_matmul.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

namespace epikv {

bool HasAvx2Products() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

#pragma GCC push_options
#pragma GCC target("avx2,fma")

namespace {

constexpr int64_t kBlock = kDenseBlock;
constexpr int kLanes = 8;
constexpr int kVectors = kBlock / kLanes;

#include "runtime/kernels/dense_tiles.inc"

// Sums of kRows rows, kBlock apart in memory, in registers, of which there are 16.
template <int kRows, int kWidth>
struct Sums {
  __m256 of[kRows][kWidth];

  EPIKV_INLINE void Read(const float* from, bool first) {
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kWidth; ++v) {
        of[r][v] = first ? _mm256_setzero_ps() : _mm256_loadu_ps(from + r * kBlock + v * kLanes);
      }
    }
  }
  EPIKV_INLINE void Write(float* to) const {
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kWidth; ++v) _mm256_storeu_ps(to + r * kBlock + v * kLanes, of[r][v]);
    }
  }
  // One input: x of each row, `stride` apart.
  EPIKV_INLINE void Add(const __m256 (&weights)[kWidth], const float* x, int64_t stride) {
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const __m256 of_row = _mm256_broadcast_ss(x + r * stride);
#pragma GCC unroll 8
      for (int v = 0; v < kWidth; ++v) of[r][v] = _mm256_fmadd_ps(weights[v], of_row, of[r][v]);
    }
  }
};

EPIKV_INLINE __m256 First(__m256i pair) { return _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)); }
EPIKV_INLINE __m256 Second(__m256i pair) {
  return _mm256_castsi256_ps(
      _mm256_and_si256(pair, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

// Some inputs' part of the sums of kWidth vectors of a block's outputs: weights in fp32, kOfWord of
// them a word.
template <int kRows, int kWidth, int kOfWord>
EPIKV_INLINE void MultiplyPanel(const float* x, int64_t stride, const float* panel, int64_t words,
                                const Ahead& ahead, bool first, float* out) {
  Sums<kRows, kWidth> sums;
  sums.Read(out, first);
  for (int64_t w = 0; w < words; ++w) {
    ahead.Fetch(w);
#pragma GCC unroll 2
    for (int64_t i = kOfWord * w; i < kOfWord * (w + 1); ++i) {
      __m256 weights[kWidth];
#pragma GCC unroll 8
      for (int v = 0; v < kWidth; ++v) weights[v] = _mm256_load_ps(panel + i * kBlock + v * kLanes);
      sums.Add(weights, x + i, stride);
    }
  }
  sums.Write(out);
}

// As above, of pairs of bfloat16, which are widened as they come.
template <int kRows, int kWidth>
EPIKV_INLINE void MultiplyPairs(const float* x, int64_t stride, const uint32_t* words,
                                int64_t pairs, const Ahead& ahead, bool first, float* out) {
  Sums<kRows, kWidth> sums;
  sums.Read(out, first);
  for (int64_t p = 0; p < pairs; ++p) {
    ahead.Fetch(p);
    __m256 wide[kWidth];
    auto load = [&](int v) __attribute__((always_inline)) {
      return _mm256_load_si256(reinterpret_cast<const __m256i*>(words + p * kBlock + v * kLanes));
    };
#pragma GCC unroll 8
    for (int v = 0; v < kWidth; ++v) wide[v] = First(load(v));
    sums.Add(wide, x + 2 * p, stride);
#pragma GCC unroll 8
    for (int v = 0; v < kWidth; ++v) wide[v] = Second(load(v));
    sums.Add(wide, x + 2 * p + 1, stride);
  }
  sums.Write(out);
}

// Calls run(first row, how many as a constant, first vector, which pass this is) for tiles of kTile
// rows and kWidth vectors.
template <int kTile, int kWidth, class Run>
EPIKV_INLINE void ForBlock(int64_t num_rows, const Run& run) {
  const int64_t tiles = TilesOf(num_rows, kTile);
  for (int64_t v = 0; v < kVectors; v += kWidth) {
    ForTiles<kTile>(
        num_rows, [&](int64_t row, auto tile) __attribute__((always_inline)) {
          run(row, tile, v * kLanes, v / kWidth * tiles + row / kTile);
        });
  }
}

template <int kTile, int kWidth>
void MultiplyFloat32As(const float* x, int64_t num_rows, const uint32_t* words, int64_t num_words,
                       int64_t stride, float* out) {
  constexpr int64_t kAtOnce = 64;
  const auto* const weights = reinterpret_cast<const float*>(words);
  ForWords(
      words, num_words, kAtOnce, TilesOf(num_rows, kTile) * kVectors / kWidth,
      [&](int64_t begin, int64_t count, const auto& ahead) __attribute__((always_inline)) {
        ForBlock<kTile, kWidth>(
            num_rows, [&](int64_t row, auto tile, int64_t output, int64_t pass)
                          __attribute__((always_inline)) {
                            MultiplyPanel<decltype(tile)::value, kWidth, 1>(
                                x + row * stride + begin, stride, weights + begin * kBlock + output,
                                count, ahead(pass), begin == 0, out + row * kBlock + output);
                          });
      });
}

template <int kTile, int kWidth>
void MultiplyPairsAs(const float* x, int64_t num_rows, const uint32_t* words, int64_t pairs,
                     int64_t stride, float* out) {
  constexpr int64_t kAtOnce = 64;
  ForWords(
      words, pairs, kAtOnce, TilesOf(num_rows, kTile) * kVectors / kWidth,
      [&](int64_t begin, int64_t count, const auto& ahead) __attribute__((always_inline)) {
        ForBlock<kTile, kWidth>(
            num_rows, [&](int64_t row, auto tile, int64_t output,
                          int64_t pass) __attribute__((always_inline)) {
              MultiplyPairs<decltype(tile)::value, kWidth>(
                  x + row * stride + 2 * begin, stride, words + begin * kBlock + output, count,
                  ahead(pass), begin == 0, out + row * kBlock + output);
            });
      });
}

void WidenPanel(const uint32_t* words, int64_t pairs, float* panel) {
  for (int64_t p = 0; p < pairs; ++p, panel += 2 * kBlock) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const __m256i pair =
          _mm256_load_si256(reinterpret_cast<const __m256i*>(words + p * kBlock + v * kLanes));
      _mm256_store_ps(panel + v * kLanes, First(pair));
      _mm256_store_ps(panel + kBlock + v * kLanes, Second(pair));
    }
  }
}

// Tiles whose sums, weights and broadcast inputs fill the registers: of many rows, which read each
// weight less often; and of few, which have nothing to do between two products.
constexpr int kMany = 6, kManyWidth = 2;
constexpr int kFew = 3, kFewWidth = 4;

}  // namespace

void MultiplyFloat32Avx2(const float* x, int64_t num_rows, const uint32_t* words, int64_t num_words,
                         int64_t stride, float* out) {
  if (num_rows == 1) {
    return MultiplyFloat32As<1, kVectors>(x, num_rows, words, num_words, stride, out);
  }
  if (num_rows <= kFew) {
    return MultiplyFloat32As<kFew, kFewWidth>(x, num_rows, words, num_words, stride, out);
  }
  MultiplyFloat32As<kMany, kManyWidth>(x, num_rows, words, num_words, stride, out);
}

void MultiplyWidenedAvx2(const float* x, int64_t num_rows, const uint32_t* words, int64_t pairs,
                         int64_t stride, float* out) {
  // A panel costs as much as some tiles that widen weights as they go.
  constexpr int64_t kAsPairs = 2 * kMany;
  if (num_rows == 1) return MultiplyPairsAs<1, kVectors>(x, num_rows, words, pairs, stride, out);
  if (num_rows <= kFew) {
    return MultiplyPairsAs<kFew, kFewWidth>(x, num_rows, words, pairs, stride, out);
  }
  if (num_rows <= kAsPairs) {
    return MultiplyPairsAs<kMany, kManyWidth>(x, num_rows, words, pairs, stride, out);
  }
  constexpr int64_t kAtOnce = 32;
  alignas(64) float panel[2 * kAtOnce * kBlock];
  ForWords(
      words, pairs, kAtOnce, TilesOf(num_rows, kMany) * kVectors / kManyWidth,
      [&](int64_t begin, int64_t count, const auto& ahead) __attribute__((always_inline)) {
        WidenPanel(words + begin * kBlock, count, panel);
        ForBlock<kMany, kManyWidth>(
            num_rows, [&](int64_t row, auto tile, int64_t output, int64_t pass)
                          __attribute__((always_inline)) {
                            MultiplyPanel<decltype(tile)::value, kManyWidth, 2>(
                                x + row * stride + 2 * begin, stride, panel + output, count,
                                ahead(pass), begin == 0, out + row * kBlock + output);
                          });
      });
}

#pragma GCC pop_options

}  // namespace epikv

#else

namespace epikv {

bool HasAvx2Products() { return false; }
void MultiplyFloat32Avx2(const float*, int64_t, const uint32_t*, int64_t, int64_t, float*) {
  std::abort();
}
void MultiplyWidenedAvx2(const float*, int64_t, const uint32_t*, int64_t, int64_t, float*) {
  std::abort();
}

}  // namespace epikv

#endif
