#include "runtime/kernels/dense_simd.h"

#include <algorithm>
#include <cstdlib>
#include <type_traits>
#include <utility>

#include "policies/clones.h"
#include "runtime/base/processor.h"
#include "runtime/kernels/dense_matmul.h"
#include "runtime/kernels/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/kernels/dense_simd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace epikv {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

// Highway wants its baseline compiled. It is not used.
void MultiplyFloat32(const float*, int64_t, const uint32_t*, int64_t, int64_t, float*) {
  std::abort();
}
void MultiplyWidened(DType, const float*, int64_t, const uint32_t*, int64_t, int64_t, float*) {
  std::abort();
}

#else

namespace {

namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kBlock = kDenseBlock;
using Floats = hn::CappedTag<float, 8>;
using Words = hn::RebindToUnsigned<Floats>;
using Vector = hn::Vec<Floats>;
constexpr int kLanes = hn::MaxLanes(Floats());
constexpr int kVectors = kBlock / kLanes;

#include "runtime/kernels/dense_tiles.inc"

// Sums of kRows rows, kBlock apart in memory, in registers.
template <int kRows, int kWidth>
struct Sums {
  Vector of[kRows][kWidth];

  EPIKV_INLINE void Read(const float* from, bool first) {
    HWY_UNROLL(6)
    for (int r = 0; r < kRows; ++r) {
      HWY_UNROLL(16)
      for (int v = 0; v < kWidth; ++v) {
        of[r][v] = first ? hn::Zero(Floats()) : hn::LoadU(Floats(), from + r * kBlock + v * kLanes);
      }
    }
  }
  EPIKV_INLINE void Write(float* to) const {
    HWY_UNROLL(6)
    for (int r = 0; r < kRows; ++r) {
      HWY_UNROLL(16)
      for (int v = 0; v < kWidth; ++v) hn::StoreU(of[r][v], Floats(), to + r * kBlock + v * kLanes);
    }
  }
  // One input: x of each row, `stride` apart.
  EPIKV_INLINE void Add(const Vector (&weights)[kWidth], const float* x, int64_t stride) {
    HWY_UNROLL(6)
    for (int r = 0; r < kRows; ++r) {
      const Vector of_row = hn::Set(Floats(), x[r * stride]);
      HWY_UNROLL(16)
      for (int v = 0; v < kWidth; ++v) of[r][v] = hn::MulAdd(weights[v], of_row, of[r][v]);
    }
  }
};

// How a pair of inputs of a block's outputs lies in memory, and becomes fp32: of the outputs from
// `output` on.
struct OfBFloat16 {
  EPIKV_INLINE static Vector First(const uint32_t* pair, int64_t output) {
    return hn::BitCast(Floats(), hn::ShiftLeft<16>(hn::Load(Words(), pair + output)));
  }
  EPIKV_INLINE static Vector Second(const uint32_t* pair, int64_t output) {
    const auto words = hn::Load(Words(), pair + output);
    return hn::BitCast(Floats(), hn::And(words, hn::Set(Words(), 0xffff0000u)));
  }
};
struct OfFloat16 {
  EPIKV_INLINE static Vector First(const uint32_t* pair, int64_t output) {
    const hn::Rebind<uint16_t, Floats> narrow;
    const auto bits = hn::LoadU(narrow, reinterpret_cast<const uint16_t*>(pair) + output);
    return hn::PromoteTo(Floats(), hn::BitCast(hn::Rebind<hwy::float16_t, Floats>(), bits));
  }
  EPIKV_INLINE static Vector Second(const uint32_t* pair, int64_t output) {
    return First(pair, kBlock + output);
  }
};

// Some inputs' part of the sums of kWidth vectors of a block's outputs: weights in fp32, kOfWord of
// them a word.
template <int kRows, int kWidth, int kOfWord>
EPIKV_INLINE void MultiplyPanel(const float* x, int64_t stride, const float* panel, int64_t words,
                                const Ahead& ahead, bool first, float* out) {
  Sums<kRows, kWidth> sums;
  sums.Read(out, first);
  for (int64_t w = 0; w < words; ++w) {
    ahead.Fetch(w);
    HWY_UNROLL(2)
    for (int64_t i = kOfWord * w; i < kOfWord * (w + 1); ++i) {
      Vector weights[kWidth];
      HWY_UNROLL(16)
      for (int v = 0; v < kWidth; ++v)
        weights[v] = hn::Load(Floats(), panel + i * kBlock + v * kLanes);
      sums.Add(weights, x + i, stride);
    }
  }
  sums.Write(out);
}

// As above, of the outputs from `output` on, and of pairs of 16 bits, which are widened as they
// come.
template <class Of, int kRows, int kWidth>
EPIKV_INLINE void MultiplyPairs(const float* x, int64_t stride, const uint32_t* words,
                                int64_t pairs, int64_t output, const Ahead& ahead, bool first,
                                float* out) {
  Sums<kRows, kWidth> sums;
  sums.Read(out, first);
  for (int64_t p = 0; p < pairs; ++p) {
    ahead.Fetch(p);
    const uint32_t* const pair = words + p * kBlock;
    Vector wide[kWidth];
    HWY_UNROLL(16)
    for (int v = 0; v < kWidth; ++v) wide[v] = Of::First(pair, output + v * kLanes);
    sums.Add(wide, x + 2 * p, stride);
    HWY_UNROLL(16)
    for (int v = 0; v < kWidth; ++v) wide[v] = Of::Second(pair, output + v * kLanes);
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

template <class Of, int kTile, int kWidth>
void MultiplyPairsAs(const float* x, int64_t num_rows, const uint32_t* words, int64_t pairs,
                     int64_t stride, float* out) {
  constexpr int64_t kAtOnce = 64;
  ForWords(
      words, pairs, kAtOnce, TilesOf(num_rows, kTile) * kVectors / kWidth,
      [&](int64_t begin, int64_t count, const auto& ahead) __attribute__((always_inline)) {
        ForBlock<kTile, kWidth>(
            num_rows, [&](int64_t row, auto tile, int64_t output, int64_t pass)
                          __attribute__((always_inline)) {
                            MultiplyPairs<Of, decltype(tile)::value, kWidth>(
                                x + row * stride + 2 * begin, stride, words + begin * kBlock, count,
                                output, ahead(pass), begin == 0, out + row * kBlock + output);
                          });
      });
}

template <class Of>
void WidenPanel(const uint32_t* words, int64_t pairs, float* panel) {
  for (int64_t p = 0; p < pairs; ++p, panel += 2 * kBlock) {
    HWY_UNROLL(16)
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t* const pair = words + p * kBlock;
      hn::Store(Of::First(pair, v * kLanes), Floats(), panel + v * kLanes);
      hn::Store(Of::Second(pair, v * kLanes), Floats(), panel + kBlock + v * kLanes);
    }
  }
}

// Tiles whose sums, weights and broadcast inputs fill the registers: of many rows, which read each
// weight less often; and of few, which have nothing to do between two products.
constexpr int kMany = 6, kManyWidth = 16 / kLanes;
constexpr int kFew = 3, kFewWidth = 32 / kLanes;

template <class Of>
void MultiplyWidenedOf(const float* x, int64_t num_rows, const uint32_t* words, int64_t pairs,
                       int64_t stride, float* out) {
  // A panel costs as much as some tiles that widen weights as they go.
  constexpr int64_t kAsPairs = 2 * kMany;
  if (num_rows == 1)
    return MultiplyPairsAs<Of, 1, kVectors>(x, num_rows, words, pairs, stride, out);
  if (num_rows <= kFew) {
    return MultiplyPairsAs<Of, kFew, kFewWidth>(x, num_rows, words, pairs, stride, out);
  }
  if (num_rows <= kAsPairs) {
    return MultiplyPairsAs<Of, kMany, kManyWidth>(x, num_rows, words, pairs, stride, out);
  }
  constexpr int64_t kAtOnce = 32;
  alignas(64) float panel[2 * kAtOnce * kBlock];
  ForWords(
      words, pairs, kAtOnce, TilesOf(num_rows, kMany) * kVectors / kManyWidth,
      [&](int64_t begin, int64_t count, const auto& ahead) __attribute__((always_inline)) {
        WidenPanel<Of>(words + begin * kBlock, count, panel);
        ForBlock<kMany, kManyWidth>(
            num_rows, [&](int64_t row, auto tile, int64_t output, int64_t pass)
                          __attribute__((always_inline)) {
                            MultiplyPanel<decltype(tile)::value, kManyWidth, 2>(
                                x + row * stride + 2 * begin, stride, panel + output, count,
                                ahead(pass), begin == 0, out + row * kBlock + output);
                          });
      });
}

}  // namespace

void MultiplyFloat32(const float* x, int64_t num_rows, const uint32_t* words, int64_t num_words,
                     int64_t stride, float* out) {
  if (num_rows == 1) {
    return MultiplyFloat32As<1, kVectors>(x, num_rows, words, num_words, stride, out);
  }
  if (num_rows <= kFew) {
    return MultiplyFloat32As<kFew, kFewWidth>(x, num_rows, words, num_words, stride, out);
  }
  MultiplyFloat32As<kMany, kManyWidth>(x, num_rows, words, num_words, stride, out);
}

void MultiplyWidened(DType dtype, const float* x, int64_t num_rows, const uint32_t* words,
                     int64_t pairs, int64_t stride, float* out) {
  dtype == DType::kFloat16 ? MultiplyWidenedOf<OfFloat16>(x, num_rows, words, pairs, stride, out)
                           : MultiplyWidenedOf<OfBFloat16>(x, num_rows, words, pairs, stride, out);
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace epikv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace epikv {

void MultiplyFloat32Simd(const float* x, int64_t num_rows, const uint32_t* words, int64_t num_words,
                         int64_t stride, float* out) {
  EPIKV_SIMD::MultiplyFloat32(x, num_rows, words, num_words, stride, out);
}

void MultiplyWidenedSimd(DType dtype, const float* x, int64_t num_rows, const uint32_t* words,
                         int64_t pairs, int64_t stride, float* out) {
  EPIKV_SIMD::MultiplyWidened(dtype, x, num_rows, words, pairs, stride, out);
}

}  // namespace epikv

#endif
