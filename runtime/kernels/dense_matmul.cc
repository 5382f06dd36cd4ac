#include "runtime/kernels/dense_matmul.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define EPIKV_AVX512 1
#include <immintrin.h>
#endif

#include "runtime/base/elements.h"
#include "runtime/base/processor.h"
#include "runtime/kernels/dense_amx.h"
#include "runtime/kernels/dense_simd.h"
#include "runtime/kernels/simd.h"

namespace epikv {
namespace {

// A packed weight is blocks of outputs, each of which is read from its first byte to its last: the
// first word of each output, then their second, ... A word has 32 bits: an input of float32, or a
// pair of bfloat16's. In place of pairs of float16 lie the first input of each output, then the
// second: what the processor widens has to stand in a row.
constexpr int64_t kBlock = kDenseBlock;

int64_t InputsOfWord(const DenseShape& shape) { return shape.dtype == DType::kFloat32 ? 1 : 2; }
int64_t WordsOf(const DenseShape& shape) {
  return (shape.inputs + InputsOfWord(shape) - 1) / InputsOfWord(shape);
}

// Where an element of a weight lies in a packed one, in elements.
int64_t PlaceOf(const DenseShape& shape, int64_t output, int64_t input) {
  const int64_t of_word = InputsOfWord(shape), words = WordsOf(shape);
  const int64_t block = output / kBlock, o = output % kBlock;
  if (shape.dtype == DType::kFloat16) return (block * words * of_word + input) * kBlock + o;
  return ((block * words + input / of_word) * kBlock + o) * of_word + input % of_word;
}

bool Widens(DensePath path) {
  return path == DensePath::kWidened || path == DensePath::kWidenedSimd;
}

EPIKV_CLONES void WidenRow(const BFloat16* x, float* row, int64_t count) { Widen(x, row, count); }
EPIKV_CLONES void WidenRow(const Float16* x, float* row, int64_t count) { Widen(x, row, count); }

// Elements of 16 bits of some outputs, each input's in a row.
void PackInRows(const uint16_t* from, int64_t outputs, int64_t inputs, uint16_t* to) {
  constexpr int64_t kAtOnce = 32;  // inputs: a cache line of each output
  for (int64_t begin = 0; begin < inputs; begin += kAtOnce) {
    const int64_t end = std::min(inputs, begin + kAtOnce);
    for (int64_t o = 0; o < outputs; ++o) {
      for (int64_t i = begin; i < end; ++i) to[i * kBlock + o] = from[o * inputs + i];
    }
  }
}

}  // namespace

int64_t PackedDenseBytes(const DenseShape& shape) {
  return DenseBlocks(shape) * WordsOf(shape) * kBlock * static_cast<int64_t>(sizeof(uint32_t));
}

void PackDenseBlock(const void* weight, const DenseShape& shape, int64_t block, void* packed) {
  constexpr int64_t kAtOnce = 16;  // words: a cache line of each output
  constexpr int64_t kWordBytes = sizeof(uint32_t);
  const int64_t words = WordsOf(shape), row_bytes = shape.inputs * ElementBytes(shape.dtype);
  const int64_t whole = row_bytes / kWordBytes;  // words
  const int64_t first = block * kBlock, outputs = std::min(kBlock, shape.outputs - first);
  const char* const from = static_cast<const char*>(weight) + first * row_bytes;
  uint32_t* const to = static_cast<uint32_t*>(packed) + first * words;
  if (outputs < kBlock || whole < words) std::memset(to, 0, words * kBlock * kWordBytes);
  if (shape.dtype == DType::kFloat16) {
    return PackInRows(reinterpret_cast<const uint16_t*>(from), outputs, shape.inputs,
                      reinterpret_cast<uint16_t*>(to));
  }
  for (int64_t begin = 0; begin < whole; begin += kAtOnce) {
    const int64_t end = std::min(whole, begin + kAtOnce);
    for (int64_t o = 0; o < outputs; ++o) {
      const char* const row = from + o * row_bytes;
      for (int64_t w = begin; w < end; ++w) {
        std::memcpy(to + w * kBlock + o, row + w * kWordBytes, kWordBytes);
      }
    }
  }
  if (whole == words) return;
  for (int64_t o = 0; o < outputs; ++o) {
    std::memcpy(to + whole * kBlock + o, from + o * row_bytes + whole * kWordBytes,
                row_bytes - whole * kWordBytes);
  }
}

void PackDense(const void* weight, const DenseShape& shape, void* packed) {
  for (int64_t block = 0; block < DenseBlocks(shape); ++block) {
    PackDenseBlock(weight, shape, block, packed);
  }
}

void UnpackDense(const void* packed, const DenseShape& shape, void* weight) {
  const int64_t bytes = ElementBytes(shape.dtype);
  for (int64_t o = 0; o < shape.outputs; ++o) {
    for (int64_t i = 0; i < shape.inputs; ++i) {
      std::memcpy(static_cast<char*>(weight) + (o * shape.inputs + i) * bytes,
                  static_cast<const char*>(packed) + PlaceOf(shape, o, i) * bytes, bytes);
    }
  }
}

absl::string_view DensePathName(DensePath path) {
  switch (path) {
    case DensePath::kFloat32Simd:
    case DensePath::kWidenedSimd:
      return SimdName();
    case DensePath::kPaired:
      return "AVX-512 BF16";
    case DensePath::kTiled:
      return "AMX";
    case DensePath::kFloat32:
    case DensePath::kWidened:
      break;
  }
  return "AVX-512";
}

int64_t DenseRowBytes(DensePath path, const DenseShape& shape) {
  const int64_t words = WordsOf(shape) * (Widens(path) ? 2 : 1);
  // An odd number of cache lines: rows that are a power of two apart push each other out.
  return ((words * static_cast<int64_t>(sizeof(uint32_t)) + 63) / 64 | 1) * 64;
}

std::vector<DensePath> DensePaths(DType dtype) {
  std::vector<DensePath> paths;
  const bool wide = dtype == DType::kFloat32;
  if (HasSimd()) paths = {wide ? DensePath::kFloat32Simd : DensePath::kWidenedSimd};
  if (!ThisProcessor().avx512) return paths;
  paths.push_back(wide ? DensePath::kFloat32 : DensePath::kWidened);
  if (dtype == DType::kBFloat16 && ThisProcessor().avx512_bf16) {
    paths.insert(ThisProcessor().fast_bf16_pairs ? paths.end() : paths.end() - 1,
                 DensePath::kPaired);
  }
  if (dtype == DType::kBFloat16 && ThisProcessor().amx_bf16) paths.push_back(DensePath::kTiled);
  return paths;
}

std::optional<DensePath> FastestDensePath(DType dtype) {
  const std::vector<DensePath> paths = DensePaths(dtype);
  if (paths.empty()) return std::nullopt;
  return paths.back();
}

#ifdef EPIKV_AVX512
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,avx512bf16")

namespace {

// Rows x vectors of 16 outputs whose sums are in registers together. Tiles of many rows read, and
// widen, each weight less often; few rows leave fewer tiles for what is between two products.
constexpr int kFew = 6, kMany = 12;
constexpr int kVectors = kBlock / 16;  // of a block; with kFew rows. Half of them with kMany

#include "runtime/kernels/dense_tiles.inc"

// Sums of kRows rows, kBlock apart in memory, in registers.
template <int kRows, int kWidth>
struct Sums {
  __m512 of[kRows][kWidth];

  EPIKV_INLINE void Read(const float* from, bool first) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kWidth; ++v) {
        of[r][v] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(from + r * kBlock + v * 16);
      }
    }
  }
  EPIKV_INLINE void Write(float* to) const {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kWidth; ++v) _mm512_storeu_ps(to + r * kBlock + v * 16, of[r][v]);
    }
  }
  // One input: x of each row, `stride` apart.
  EPIKV_INLINE void Add(const __m512 weights[kWidth], const float* x, int64_t stride) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const __m512 of_row = _mm512_set1_ps(x[r * stride]);
#pragma GCC unroll 4
      for (int v = 0; v < kWidth; ++v) of[r][v] = _mm512_fmadd_ps(weights[v], of_row, of[r][v]);
    }
  }
  // A pair of inputs.
  EPIKV_INLINE void Add(const __m512i weights[kWidth], const uint32_t* x, int64_t stride) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const auto of_row = (__m512bh)_mm512_set1_epi32(static_cast<int>(x[r * stride]));
#pragma GCC unroll 4
      for (int v = 0; v < kWidth; ++v) {
        of[r][v] = _mm512_dpbf16_ps(of[r][v], (__m512bh)weights[v], of_row);
      }
    }
  }
};

// How a pair of inputs of a block's outputs becomes fp32: of the outputs from `output` on.
struct OfBFloat16 {
  EPIKV_INLINE static __m512 First(const uint32_t* pair, int64_t output) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_load_si512(pair + output), 16));
  }
  EPIKV_INLINE static __m512 Second(const uint32_t* pair, int64_t output) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_load_si512(pair + output),
                                                _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
};
struct OfFloat16 {
  EPIKV_INLINE static __m512 First(const uint32_t* pair, int64_t output) {
    const auto* const narrow = reinterpret_cast<const uint16_t*>(pair) + output;
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(narrow)));
  }
  EPIKV_INLINE static __m512 Second(const uint32_t* pair, int64_t output) {
    return First(pair, kBlock + output);
  }
};

template <int kWidth>
EPIKV_INLINE void LoadPair(const uint32_t* words, __m512i (&weights)[kWidth]) {
#pragma GCC unroll 4
  for (int v = 0; v < kWidth; ++v) weights[v] = _mm512_load_si512(words + v * 16);
}

// Some inputs' part of a block's sums: words [pairs, kBlock]; x: those inputs of kRows rows.
template <int kRows>
EPIKV_INLINE void MultiplyPaired(const uint32_t* x, int64_t stride, const uint32_t* words,
                                 int64_t pairs, const Ahead& ahead, bool first, float* out) {
  Sums<kRows, kVectors> sums;
  sums.Read(out, first);
  for (int64_t p = 0; p < pairs; ++p) {
    __m512i weights[kVectors];
    LoadPair(words + p * kBlock, weights);
    ahead.Fetch(p);
    sums.Add(weights, x + p, stride);
  }
  sums.Write(out);
}

// Of kWidth vectors of the block's outputs, from `output` on.
template <class Of, int kRows, int kWidth>
EPIKV_INLINE void MultiplyWidened(const float* x, int64_t stride, const uint32_t* words,
                                  int64_t pairs, int64_t output, const Ahead& ahead, bool first,
                                  float* out) {
  Sums<kRows, kWidth> sums;
  sums.Read(out, first);
  for (int64_t p = 0; p < pairs; ++p) {
    const uint32_t* const pair = words + p * kBlock;
    __m512 wide[kWidth];
    ahead.Fetch(p);
#pragma GCC unroll 4
    for (int v = 0; v < kWidth; ++v) wide[v] = Of::First(pair, output + v * 16);
    sums.Add(wide, x + 2 * p, stride);
#pragma GCC unroll 4
    for (int v = 0; v < kWidth; ++v) wide[v] = Of::Second(pair, output + v * 16);
    sums.Add(wide, x + 2 * p + 1, stride);
  }
  sums.Write(out);
}

// As above, of weights in fp32: panel [words x kOfWord, kBlock].
template <int kRows, int kOfWord>
EPIKV_INLINE void MultiplyPanel(const float* x, int64_t stride, const float* panel, int64_t words,
                                const Ahead& ahead, bool first, float* out) {
  Sums<kRows, kVectors> sums;
  sums.Read(out, first);
  for (int64_t w = 0; w < words; ++w) {
    ahead.Fetch(w);
#pragma GCC unroll 2
    for (int64_t i = kOfWord * w; i < kOfWord * (w + 1); ++i) {
      __m512 weights[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) weights[v] = _mm512_load_ps(panel + i * kBlock + v * 16);
      sums.Add(weights, x + i, stride);
    }
  }
  sums.Write(out);
}

template <class Of>
EPIKV_INLINE void WidenPanel(const uint32_t* words, int64_t pairs, float* panel) {
  for (int64_t p = 0; p < pairs; ++p, panel += 2 * kBlock) {
    const uint32_t* const pair = words + p * kBlock;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      _mm512_store_ps(panel + v * 16, Of::First(pair, v * 16));
      _mm512_store_ps(panel + kBlock + v * 16, Of::Second(pair, v * 16));
    }
  }
}

// Tiles of kFew rows, of weights that are fp32 in memory.
void MultiplyFloat32(const void* rows, int64_t num_rows, const uint32_t* words, int64_t num_words,
                     int64_t stride, float* out) {
  constexpr int64_t kAtOnce = 64;
  const auto* const x = static_cast<const float*>(rows);
  const auto* const weights = reinterpret_cast<const float*>(words);
  ForWords(
      words, num_words, kAtOnce, TilesOf(num_rows, kFew),
      [&](int64_t begin, int64_t count, const auto& ahead) __attribute__((always_inline)) {
        ForTiles<kFew>(
            num_rows, [&](int64_t row, auto tile) __attribute__((always_inline)) {
              MultiplyPanel<decltype(tile)::value, 1>(
                  x + row * stride + begin, stride, weights + begin * kBlock, count,
                  ahead(row / kFew), begin == 0, out + row * kBlock);
            });
      });
}

void MultiplyPairs(const void* rows, int64_t num_rows, const uint32_t* words, int64_t pairs,
                   int64_t stride, float* out) {
  constexpr int64_t kAtOnce = 96;
  const auto* const x = static_cast<const uint32_t*>(rows);
  ForWords(
      words, pairs, kAtOnce, TilesOf(num_rows, kFew),
      [&](int64_t begin, int64_t count, const auto& ahead) __attribute__((always_inline)) {
        ForTiles<kFew>(
            num_rows, [&](int64_t row, auto tile) __attribute__((always_inline)) {
              MultiplyPaired<decltype(tile)::value>(
                  x + row * stride + begin, stride, words + begin * kBlock, count,
                  ahead(row / kFew), begin == 0, out + row * kBlock);
            });
      });
}

// Tiles of kTile rows and kWidth vectors widen weights as they go.
template <class Of, int kTile, int kWidth>
void MultiplyAsWidened(const float* x, int64_t num_rows, const uint32_t* words, int64_t pairs,
                       int64_t stride, float* out) {
  constexpr int64_t kAtOnce = 64;
  const int64_t tiles = TilesOf(num_rows, kTile);
  ForWords(
      words, pairs, kAtOnce, tiles * kVectors / kWidth,
      [&](int64_t begin, int64_t count, const auto& ahead) __attribute__((always_inline)) {
        for (int64_t v = 0; v < kVectors; v += kWidth) {
          ForTiles<kTile>(
              num_rows, [&](int64_t row, auto tile) __attribute__((always_inline)) {
                MultiplyWidened<Of, decltype(tile)::value, kWidth>(
                    x + row * stride + 2 * begin, stride, words + begin * kBlock, count, v * 16,
                    ahead(v / kWidth * tiles + row / kTile), begin == 0,
                    out + row * kBlock + v * 16);
              });
        }
      });
}

template <class Of>
void MultiplyWide(const void* rows, int64_t num_rows, const uint32_t* words, int64_t pairs,
                  int64_t stride, float* out) {
  // A panel costs as much as some tiles that widen weights as they go.
  constexpr int64_t kAsWidened = 2 * kMany;
  const auto* const x = static_cast<const float*>(rows);
  if (num_rows <= kFew) {
    return MultiplyAsWidened<Of, kFew, kVectors>(x, num_rows, words, pairs, stride, out);
  }
  if (num_rows <= kAsWidened) {
    return MultiplyAsWidened<Of, kMany, kVectors / 2>(x, num_rows, words, pairs, stride, out);
  }
  constexpr int64_t kAtOnce = 32;
  alignas(64) float panel[2 * kAtOnce * kBlock];
  ForWords(
      words, pairs, kAtOnce, TilesOf(num_rows, kFew),
      [&](int64_t begin, int64_t count, const auto& ahead) __attribute__((always_inline)) {
        WidenPanel<Of>(words + begin * kBlock, count, panel);
        ForTiles<kFew>(
            num_rows, [&](int64_t row, auto tile) __attribute__((always_inline)) {
              MultiplyPanel<decltype(tile)::value, 2>(x + row * stride + 2 * begin, stride, panel,
                                                      count, ahead(row / kFew), begin == 0,
                                                      out + row * kBlock);
            });
      });
}

}  // namespace

#pragma GCC pop_options
#endif

void PrepareDense(DensePath path, const void* x, const DenseShape& shape, void* row) {
  const int64_t inputs = shape.inputs;
  if (Widens(path)) {
    auto* const to = static_cast<float*>(row);
    if (shape.dtype == DType::kFloat16) {
      WidenRow(static_cast<const Float16*>(x), to, inputs);
    } else {
      WidenRow(static_cast<const BFloat16*>(x), to, inputs);
    }
    if (inputs % 2 == 1) to[inputs] = 0;
    return;
  }
  const int64_t bytes = inputs * ElementBytes(shape.dtype);
  std::memcpy(row, x, bytes);
  if (path == DensePath::kPaired && inputs % 2 == 1) static_cast<uint16_t*>(row)[inputs] = 0;
  if (path == DensePath::kTiled) {
    std::memset(static_cast<char*>(row) + bytes, 0, DenseRowBytes(path, shape) - bytes);
  }
}

void MultiplyDense(DensePath path, const void* rows, int64_t num_rows, const void* packed,
                   const DenseShape& shape, int64_t block, float* out) {
  const int64_t stride = DenseRowBytes(path, shape) / static_cast<int64_t>(sizeof(uint32_t));
  const int64_t num_words = WordsOf(shape);
  const uint32_t* const words = static_cast<const uint32_t*>(packed) + block * num_words * kBlock;
  switch (path) {
    case DensePath::kFloat32Simd:
      return MultiplyFloat32Simd(static_cast<const float*>(rows), num_rows, words, num_words,
                                 stride, out);
    case DensePath::kWidenedSimd:
      return MultiplyWidenedSimd(shape.dtype, static_cast<const float*>(rows), num_rows, words,
                                 num_words, stride, out);
    case DensePath::kTiled:
      return MultiplyDenseTiles(rows, num_rows, DenseRowBytes(path, shape), words, num_words, out);
#ifdef EPIKV_AVX512
    case DensePath::kFloat32:
      return MultiplyFloat32(rows, num_rows, words, num_words, stride, out);
    case DensePath::kWidened:
      return shape.dtype == DType::kFloat16
                 ? MultiplyWide<OfFloat16>(rows, num_rows, words, num_words, stride, out)
                 : MultiplyWide<OfBFloat16>(rows, num_rows, words, num_words, stride, out);
    case DensePath::kPaired:
      return MultiplyPairs(rows, num_rows, words, num_words, stride, out);
#else
    default:  // of no processor that this is compiled for
      std::abort();
#endif
  }
}

}  // namespace epikv
