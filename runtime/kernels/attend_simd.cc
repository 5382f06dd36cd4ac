#include "runtime/kernels/attend_simd.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "policies/clones.h"
#include "runtime/base/elements.h"
#include "runtime/kernels/attend_blocks.h"
#include "runtime/kernels/bent_logits.h"
#include "runtime/kernels/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/kernels/attend_simd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace epikv {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

// Highway wants its baseline compiled. It is not used.
void AttendLane(const PrefillLane&, const LaneShape&, float*, float*) { std::abort(); }

#else

namespace {

namespace hn = hwy::HWY_NAMESPACE;

constexpr int kTile = 3;  // queries whose sums are in registers together

#include "runtime/kernels/attend_blocks.inc"

using Floats = hn::CappedTag<float, 8>;
using Vector = hn::Vec<Floats>;
constexpr int kLanes = hn::MaxLanes(Floats());
constexpr int kOfBlock = kBlock / kLanes;  // vectors

EPIKV_INLINE Vector Load(const float* p) { return hn::Load(Floats(), p); }
EPIKV_INLINE void Store(Vector x, float* p) { hn::Store(x, Floats(), p); }
EPIKV_INLINE Vector All(float x) { return hn::Set(Floats(), x); }

// In the order of AVX-512's.
EPIKV_INLINE float SumOf(const float* mass) {
  float sum[kVector / 2];
  for (int i = 0; i < 8; ++i) sum[i] = mass[i] + mass[i + 8];
  for (int i = 0; i < 4; ++i) sum[i] += sum[i + 4];
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// exp(x) for x <= 0, as ExpNegative.
EPIKV_INLINE Vector Exp(Vector x) {
  const hn::RebindToSigned<Floats> integers;
  const Vector clamped = hn::Max(x, All(-87.0f));
  const Vector n = hn::Round(hn::Mul(clamped, All(1.44269504f)));
  Vector r = hn::NegMulAdd(n, All(0.693359375f), clamped);
  r = hn::MulAdd(n, All(2.12194440e-4f), r);
  Vector p = All(1.9875691500e-4f);
  p = hn::MulAdd(p, r, All(1.3981999507e-3f));
  p = hn::MulAdd(p, r, All(8.3334519073e-3f));
  p = hn::MulAdd(p, r, All(4.1665795894e-2f));
  p = hn::MulAdd(p, r, All(1.6666665459e-1f));
  p = hn::MulAdd(p, r, All(5.0000001201e-1f));
  p = hn::MulAdd(hn::Mul(p, r), r, hn::Add(r, All(1.0f)));
  const auto exponent = hn::Add(hn::ConvertTo(integers, n), hn::Set(integers, 127));
  const Vector power = hn::BitCast(Floats(), hn::ShiftLeft<23>(exponent));
  return hn::IfThenZeroElse(hn::Lt(x, All(-87.0f)), hn::Mul(p, power));
}

// Rows to columns: as many rows of words as a vector has, in place.
template <class D>
EPIKV_INLINE void Transpose(D d, hn::Vec<D>* r) {
  constexpr int kRows = hn::MaxLanes(D());
  const hn::Repartition<uint64_t, D> pairs;
  hn::Vec<D> t[kRows];
  HWY_UNROLL(4)
  for (int i = 0; i < kRows / 2; ++i) {
    t[2 * i] = hn::InterleaveLower(d, r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = hn::InterleaveUpper(d, r[2 * i], r[2 * i + 1]);
  }
  const auto wide = [&](int i) __attribute__((always_inline)) { return hn::BitCast(pairs, t[i]); };
  HWY_UNROLL(2)
  for (int i = 0; i < kRows; i += 4) {
    r[i] = hn::BitCast(d, hn::InterleaveLower(pairs, wide(i), wide(i + 2)));
    r[i + 1] = hn::BitCast(d, hn::InterleaveUpper(pairs, wide(i), wide(i + 2)));
    r[i + 2] = hn::BitCast(d, hn::InterleaveLower(pairs, wide(i + 1), wide(i + 3)));
    r[i + 3] = hn::BitCast(d, hn::InterleaveUpper(pairs, wide(i + 1), wide(i + 3)));
  }
  if constexpr (kRows == 8) {
    HWY_UNROLL(4)
    for (int i = 0; i < 4; ++i) {
      const auto low = r[i], high = r[i + 4];
      r[i] = hn::ConcatLowerLower(d, high, low);
      r[i + 4] = hn::ConcatUpperUpper(d, high, low);
    }
  }
}

// Transposes some rows' words, those from `rows` on as zeros, and calls store(word, its keys): from
// word `begin` on, in squares.
template <class D, class StoreWord>
EPIKV_INLINE void ForWords(D d, const char* keys, int64_t row_bytes, int64_t rows, int64_t& begin,
                           int64_t words, const StoreWord& store) {
  constexpr int kSide = hn::MaxLanes(D());
  const hn::Repartition<uint8_t, D> bytes;
  for (; begin + kSide <= words; begin += kSide) {
    hn::Vec<D> r[kSide];
    HWY_UNROLL(8)
    for (int t = 0; t < kSide; ++t) {
      const auto* const from = reinterpret_cast<const uint8_t*>(keys + t * row_bytes + begin * 4);
      r[t] = t < rows ? hn::BitCast(d, hn::LoadU(bytes, from)) : hn::Zero(d);
    }
    Transpose(d, r);
    HWY_UNROLL(8)
    for (int t = 0; t < kSide; ++t) store(begin + t, r[t]);
  }
}

// Element kPart of each word, as fp32.
template <class Cached, int kPart, class D>
EPIKV_INLINE auto Widened(D d, hn::Vec<D> words) {
  const hn::RebindToFloat<D> floats;
  if constexpr (std::is_same_v<Cached, float>) {
    return hn::BitCast(floats, words);
  } else if constexpr (std::is_same_v<Cached, BFloat16>) {
    return hn::BitCast(
        floats, kPart == 0 ? hn::ShiftLeft<16>(words) : hn::And(words, hn::Set(d, 0xffff0000u)));
  } else if constexpr (std::is_same_v<Cached, Float16>) {
    const auto narrow =
        hn::TruncateTo(hn::Rebind<uint16_t, D>(), hn::ShiftRight<16 * kPart>(words));
    return hn::PromoteTo(floats, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), narrow));
  } else {
    const auto integers = hn::BitCast(hn::RebindToSigned<D>(), words);
    return hn::ConvertTo(floats, hn::ShiftRight<24>(hn::ShiftLeft<24 - 8 * kPart>(integers)));
  }
}

// As many elements of a row as a vector has floats.
EPIKV_INLINE Vector LoadRow(const float* p) { return hn::LoadU(Floats(), p); }
EPIKV_INLINE Vector LoadRow(const BFloat16* p) {
  const hn::Rebind<uint16_t, Floats> narrow;
  const auto bits = hn::PromoteTo(hn::RebindToUnsigned<Floats>(),
                                  hn::LoadU(narrow, reinterpret_cast<const uint16_t*>(p)));
  return hn::BitCast(Floats(), hn::ShiftLeft<16>(bits));
}
EPIKV_INLINE Vector LoadRow(const Float16* p) {
  const hn::Rebind<uint16_t, Floats> narrow;
  const auto bits = hn::LoadU(narrow, reinterpret_cast<const uint16_t*>(p));
  return hn::PromoteTo(Floats(), hn::BitCast(hn::Rebind<hwy::float16_t, Floats>(), bits));
}
EPIKV_INLINE Vector LoadRow(const int8_t* p) {
  const auto narrow = hn::LoadU(hn::Rebind<int8_t, Floats>(), p);
  return hn::ConvertTo(Floats(), hn::PromoteTo(hn::RebindToSigned<Floats>(), narrow));
}

// Lanes widened to fp32: T is what queries are of, C what the lanes' rows are.
template <class T, class C>
struct Lanes {
  static constexpr int64_t kKeys = 1;
  static constexpr bool kTiles = false;
  static constexpr bool kScaled = std::is_same_v<C, int8_t>;
  using Element = T;
  using Cached = C;

  static int64_t Words(int64_t width) { return width; }
  static void PackQueries(const T* queries, int64_t count, uint32_t* words) {
    Widen(queries, reinterpret_cast<float*>(words), count);
  }
  // kVector keys from `keys` on into a column of [width, kBlock].
  EPIKV_INLINE static void PackKeys(const char* keys, int64_t row_bytes, int64_t rows,
                                    int64_t width, uint32_t* column) {
    using Squares = hn::RebindToUnsigned<Floats>;
    using Small = hn::CappedTag<uint32_t, 4>;
    constexpr int kParts = sizeof(uint32_t) / sizeof(C);
    const int64_t words = width / kParts;
    int64_t begin = 0;
    for (int64_t t = 0; t < kVector; t += kLanes) {
      begin = 0;
      PackSquares(Squares(), keys + t * row_bytes, row_bytes, rows - t, begin, words, column + t);
    }
    if (begin == words) return;
    const int64_t rest = begin;
    for (int64_t t = 0; t < kVector; t += hn::MaxLanes(Small())) {
      begin = rest;
      PackSquares(Small(), keys + t * row_bytes, row_bytes, rows - t, begin, words, column + t);
    }
  }
  // Sums [width] over their mass, as elements.
  EPIKV_INLINE static void Finish(const float* sums, float mass, int64_t width, T* out) {
    const float norm = 1.0f / mass;
    for (int64_t i = 0; i < width; ++i) epikv::Store(out + i, norm * sums[i]);
  }

 private:
  template <class D>
  EPIKV_INLINE static void PackSquares(D d, const char* keys, int64_t row_bytes, int64_t rows,
                                       int64_t& begin, int64_t words, uint32_t* column) {
    constexpr int kParts = sizeof(uint32_t) / sizeof(C);
    const hn::RebindToFloat<D> floats;
    ForWords(
        d, keys, row_bytes, rows, begin,
        words, [&](int64_t i, auto word) __attribute__((always_inline)) {
          auto* const to = reinterpret_cast<float*>(column + kParts * i * kBlock);
          hn::Store(Widened<C, 0>(d, word), floats, to);
          if constexpr (kParts > 1) hn::Store(Widened<C, 1>(d, word), floats, to + kBlock);
          if constexpr (kParts > 2) {
            hn::Store(Widened<C, 2>(d, word), floats, to + 2 * kBlock);
            hn::Store(Widened<C, 3>(d, word), floats, to + 3 * kBlock);
          }
        });
  }
};

template <class As, int kQueries>
EPIKV_INLINE void Logits(const uint32_t* queries, const uint32_t* keys, int64_t words, float scale,
                         const Scales& scales, float* logits) {
  const auto* const q = reinterpret_cast<const float*>(queries);
  const auto* const k = reinterpret_cast<const float*>(keys);
  // Four sums one after another, added at the end, lose fewer digits than one.
  const int64_t part = (words + 3) / 4;
  for (int64_t begin = 0; begin < words; begin += part) {
    Vector sum[kQueries][kOfBlock];
    HWY_UNROLL(3)
    for (int g = 0; g < kQueries; ++g) {
      HWY_UNROLL(8)
      for (int v = 0; v < kOfBlock; ++v) sum[g][v] = hn::Zero(Floats());
    }
    for (int64_t i = begin; i < std::min(words, begin + part); ++i) {
      Vector key[kOfBlock];
      HWY_UNROLL(8)
      for (int v = 0; v < kOfBlock; ++v) key[v] = Load(k + i * kBlock + v * kLanes);
      HWY_UNROLL(3)
      for (int g = 0; g < kQueries; ++g) {
        const Vector query = All(q[g * words + i]);
        HWY_UNROLL(8)
        for (int v = 0; v < kOfBlock; ++v) sum[g][v] = hn::MulAdd(key[v], query, sum[g][v]);
      }
    }
    HWY_UNROLL(3)
    for (int g = 0; g < kQueries; ++g) {
      HWY_UNROLL(8)
      for (int v = 0; v < kOfBlock; ++v) {
        float* const at = logits + g * kBlock + v * kLanes;
        Store(begin == 0 ? sum[g][v] : hn::Add(Load(at), sum[g][v]), at);
      }
    }
  }
  for (int v = 0; v < kOfBlock; ++v) {
    Vector factor = All(scale);
    if constexpr (As::kScaled) factor = hn::Mul(factor, Load(scales.of + v * kLanes));
    for (int g = 0; g < kQueries; ++g) {
      float* const at = logits + g * kBlock + v * kLanes;
      Store(hn::Mul(Load(at), factor), at);
    }
  }
}

template <class As>
EPIKV_INLINE void Weigh(const Scratch<As>& s, int64_t g, int64_t value_width,
                        const Scales& scales) {
  const float* const logit = s.logits + g * kBlock;
  auto* const weights = reinterpret_cast<float*>(s.weights + g * kBlock);
  float* const mass = s.mass + g * kVector;
  Vector largest = Load(logit);
  for (int v = 1; v < kOfBlock; ++v) largest = hn::Max(largest, Load(logit + v * kLanes));
  const float top = hn::GetLane(hn::MaxOfLanes(Floats(), largest));
  if (top > s.peak[g]) {  // rare behind the first blocks
    const Vector shrink = Exp(All(s.peak[g] - top));
    float* const sums = s.sums + g * value_width;
    for (int64_t i = 0; i < value_width; i += kLanes)
      Store(hn::Mul(shrink, Load(sums + i)), sums + i);
    for (int i = 0; i < kVector; i += kLanes) Store(hn::Mul(shrink, Load(mass + i)), mass + i);
    s.peak[g] = top;
  }
  if (s.peak[g] == -INFINITY) {  // nothing is seen yet
    std::fill(weights, weights + kBlock, 0.0f);
    return;
  }
  const Vector peak = All(s.peak[g]);
  for (int i = 0; i < kVector; i += kLanes) {
    Vector x[2];
    for (int part = 0; part < 2; ++part) {
      const int at = i + part * static_cast<int>(kVector);
      x[part] = Exp(hn::Sub(Load(logit + at), peak));
      Store(As::kScaled ? hn::Mul(x[part], Load(scales.of + at)) : x[part], weights + at);
    }
    Store(hn::Add(Load(mass + i), hn::Add(x[0], x[1])), mass + i);
  }
}

// AddValues of kVectors x kLanes columns.
template <class As, int kQueries, int kVectors>
EPIKV_INLINE void AddColumns(const uint32_t* weights, const char* values, int64_t row_bytes,
                             const Ahead& ahead, int64_t count, int64_t width, float* sums) {
  Vector sum[kQueries][kVectors];
  HWY_UNROLL(3)
  for (int g = 0; g < kQueries; ++g) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) sum[g][v] = Load(sums + g * width + v * kLanes);
  }
  for (int64_t j = 0; j < count; ++j) {
    ahead.Fetch(j);
    const auto* const row = reinterpret_cast<const typename As::Cached*>(values + j * row_bytes);
    Vector weight[kQueries];
    HWY_UNROLL(3)
    for (int g = 0; g < kQueries; ++g) {
      weight[g] = All(reinterpret_cast<const float*>(weights)[g * kBlock + j]);
    }
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) {
      const Vector value = LoadRow(row + v * kLanes);
      HWY_UNROLL(3)
      for (int g = 0; g < kQueries; ++g) sum[g][v] = hn::MulAdd(value, weight[g], sum[g][v]);
    }
  }
  HWY_UNROLL(3)
  for (int g = 0; g < kQueries; ++g) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) Store(sum[g][v], sums + g * width + v * kLanes);
  }
}

template <class As, int kQueries>
EPIKV_INLINE void AddValues(const uint32_t* weights, const char* values, int64_t row_bytes,
                            Ahead ahead, int64_t count, int64_t width, float* sums) {
  constexpr int kVectors = kOfBlock;
  const int64_t element = sizeof(typename As::Cached);
  int64_t column = 0;
  for (; column + kVectors * kLanes <= width; column += kVectors * kLanes) {
    AddColumns<As, kQueries, kVectors>(weights, values + column * element, row_bytes, ahead, count,
                                       width, sums + column);
    ahead.row_bytes = 0;  // once
  }
  if (column == width) return;
  AddColumns<As, kQueries, kVectors / 2>(weights, values + column * element, row_bytes, ahead,
                                         count, width, sums + column);
}

template <class T>
void AttendOf(const PrefillLane& lane, const LaneShape& shape, float* left, float* scratch) {
  if (shape.stored == KvDType::kInt8) return Attend<Lanes<T, int8_t> >(lane, shape, left, scratch);
  Attend<Lanes<T, T> >(lane, shape, left, scratch);
}

}  // namespace

void AttendLane(const PrefillLane& lane, const LaneShape& shape, float* left, float* scratch) {
  switch (shape.dtype) {
    case DType::kFloat32:
      return AttendOf<float>(lane, shape, left, scratch);
    case DType::kBFloat16:
      return AttendOf<BFloat16>(lane, shape, left, scratch);
    case DType::kFloat16:
      return AttendOf<Float16>(lane, shape, left, scratch);
  }
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace epikv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace epikv {
bool CanAttendSimd(const LaneShape& shape) { return HasSimd() && CanAttendBlocks(shape); }

void AttendSimd(const PrefillLane& lane, const LaneShape& shape, float* left, float* scratch) {
  EPIKV_SIMD::AttendLane(lane, shape, left, scratch);
}

}  // namespace epikv

#endif
