#include "runtime/kernels/quantized_matmul.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define EPIKV_VNNI 1
#include <immintrin.h>
#endif

#include "runtime/base/elements.h"
#include "runtime/base/processor.h"
#include "runtime/kernels/quantized_amx.h"
#include "runtime/kernels/quantized_simd.h"
#include "runtime/kernels/simd.h"

namespace epikv {
namespace {

// A packed weight is blocks of outputs, each of which is read from its first byte to its last: for
// each group the outputs' scales, then its inputs, four of each output after four of the one before
// it (a "quad": what one product of the processor takes). Integers are stored above `kZero`, where
// they are positive, as that product wants one side. Of 4 bits, a byte holds an input of a quad in
// its lower half, and the same of the next quad in its upper.
constexpr int64_t kBlock = kQuantizedBlock;
constexpr int64_t kQuad = 4;
constexpr int64_t kFewestOfTiles = 12;  // rows from which a matrix unit is faster

int32_t ZeroOf(const QuantizedShape& shape) { return shape.bits == 8 ? 128 : 8; }
int64_t GroupBytes(const QuantizedShape& shape) {
  return kBlock * (static_cast<int64_t>(sizeof(uint16_t)) + shape.group * shape.bits / 8);
}

// Where group `group` of block `block` begins.
const uint8_t* GroupAt(const void* packed, const QuantizedShape& shape, int64_t block,
                       int64_t group) {
  return static_cast<const uint8_t*>(packed) + (block * shape.groups() + group) * GroupBytes(shape);
}

// The weight of an output at an input, less than what it stands above: both within the group.
struct Place {
  int64_t byte, shift;
};
Place PlaceOf(const QuantizedShape& shape, int64_t output, int64_t input) {
  const int64_t quad = input / kQuad, in_quad = output * kQuad + input % kQuad;
  if (shape.bits == 8) return {quad * kBlock * kQuad + in_quad, 0};
  return {quad / 2 * kBlock * kQuad + in_quad, quad % 2 * 4};
}

const uint8_t* IntegersOf(const uint8_t* group) { return group + kBlock * sizeof(uint16_t); }

int32_t IntegerAt(const uint8_t* group, const QuantizedShape& shape, int64_t output,
                  int64_t input) {
  const Place place = PlaceOf(shape, output, input);
  const int32_t mask = shape.bits == 8 ? 0xff : 0xf;
  return (IntegersOf(group)[place.byte] >> place.shift & mask) - ZeroOf(shape);
}

float ScaleAt(const uint8_t* group, int64_t output) {
  return Load(reinterpret_cast<const BFloat16*>(group) + output);
}

void MultiplyAnywhere(const QuantizedRows& x, const void* packed, const QuantizedShape& shape,
                      int64_t block, float* out) {
  const int64_t groups = shape.groups();
  std::fill(out, out + x.rows * kBlock, 0.0f);
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* const group = GroupAt(packed, shape, block, g);
    for (int64_t r = 0; r < x.rows; ++r) {
      const int8_t* const values = x.values + r * shape.inputs + g * shape.group;
      for (int64_t o = 0; o < kBlock; ++o) {
        int32_t sum = 0;
        for (int64_t i = 0; i < shape.group; ++i) sum += values[i] * IntegerAt(group, shape, o, i);
        const float scale = ScaleAt(group, o) * x.scales[r * groups + g];
        out[r * kBlock + o] = std::fma(static_cast<float>(sum), scale, out[r * kBlock + o]);
      }
    }
  }
}

#ifdef EPIKV_VNNI
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,avx512vnni")

constexpr int kTile = 6;  // rows whose sums are in registers together

// What belongs to a block's outputs, 16 a vector.
struct OfBlock {
  __m512i v0, v1, v2, v3;
};
static_assert(kBlock == 4 * 16);

EPIKV_INLINE OfBlock All(int32_t value) {
  const __m512i all = _mm512_set1_epi32(value);
  return {all, all, all, all};
}

// Adds four inputs' products.
EPIKV_INLINE void AddQuad(OfBlock& sums, const OfBlock& weights, const int8_t* values) {
  int32_t four = 0;
  std::memcpy(&four, values, sizeof(four));
  const __m512i quad = _mm512_set1_epi32(four);
  sums.v0 = _mm512_dpbusd_epi32(sums.v0, weights.v0, quad);
  sums.v1 = _mm512_dpbusd_epi32(sums.v1, weights.v1, quad);
  sums.v2 = _mm512_dpbusd_epi32(sums.v2, weights.v2, quad);
  sums.v3 = _mm512_dpbusd_epi32(sums.v3, weights.v3, quad);
}

template <int kBits>
EPIKV_INLINE __m512i LoadQuads(const uint8_t* integers, int quad, int vector) {
  const uint8_t* const from = integers + vector * 64;
  if constexpr (kBits == 8) return _mm512_loadu_si512(from + quad * kBlock * kQuad);
  const __m512i both = _mm512_loadu_si512(from);
  return _mm512_and_si512(quad == 0 ? both : _mm512_srli_epi16(both, 4), _mm512_set1_epi8(0xf));
}
// A quad of each output.
template <int kBits>
EPIKV_INLINE OfBlock LoadWeights(const uint8_t* integers, int quad) {
  return {LoadQuads<kBits>(integers, quad, 0), LoadQuads<kBits>(integers, quad, 1),
          LoadQuads<kBits>(integers, quad, 2), LoadQuads<kBits>(integers, quad, 3)};
}

EPIKV_INLINE void Scale(__m512i sums, const uint16_t* scales, __m512 of_row, bool first,
                        float* out) {
  const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales));
  const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
  const __m512 before = first ? _mm512_setzero_ps() : _mm512_loadu_ps(out);
  _mm512_storeu_ps(out,
                   _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), _mm512_mul_ps(scale, of_row), before));
}

// What is read next, of which some lines are fetched with each step of a tile.
struct Ahead {
  const uint8_t* lines;
  int64_t per_step;

  EPIKV_INLINE void Fetch() {
    for (int64_t i = 0; i < per_step; ++i) _mm_prefetch(lines + i * 64, _MM_HINT_T1);
    lines += per_step * 64;
  }
};

// One group's part of a block's outputs, for kRows rows.
template <int kBits, int kRows>
EPIKV_INLINE void MultiplyTile(const QuantizedRows& x, int64_t row, int64_t g, const uint8_t* group,
                               const QuantizedShape& shape, Ahead& ahead, float* out) {
  constexpr int kQuads = 2;  // at a time: what one load holds of 4 bits
  const int64_t groups = shape.groups(), stride = shape.inputs;
  const int32_t* const above = x.sums + row * groups + g;
  auto begin = [&](int r) __attribute__((always_inline)) {
    return r < kRows ? All(-above[r * groups] * (kBits == 8 ? 128 : 8)) : OfBlock();
  };
  OfBlock r0 = begin(0), r1 = begin(1), r2 = begin(2), r3 = begin(3), r4 = begin(4), r5 = begin(5);
  const uint8_t* integers = IntegersOf(group);
  const int8_t* values = x.values + row * stride + g * shape.group;
  const int8_t* const end = values + shape.group;
  for (; values < end; values += kQuads * kQuad, integers += kBlock * kBits) {
    ahead.Fetch();
#pragma GCC unroll 2
    for (int q = 0; q < kQuads; ++q) {
      const OfBlock weights = LoadWeights<kBits>(integers, q);
      const int8_t* const from = values + q * kQuad;
      AddQuad(r0, weights, from);
      if constexpr (kRows > 1) AddQuad(r1, weights, from + stride);
      if constexpr (kRows > 2) AddQuad(r2, weights, from + 2 * stride);
      if constexpr (kRows > 3) AddQuad(r3, weights, from + 3 * stride);
      if constexpr (kRows > 4) AddQuad(r4, weights, from + 4 * stride);
      if constexpr (kRows > 5) AddQuad(r5, weights, from + 5 * stride);
    }
  }
  const auto* const scales = reinterpret_cast<const uint16_t*>(group);
  auto finish = [&](int r, const OfBlock& sums) __attribute__((always_inline)) {
    if (r >= kRows) return;
    const __m512 of_row = _mm512_set1_ps(x.scales[(row + r) * groups + g]);
    float* const to = out + (row + r) * kBlock;
    Scale(sums.v0, scales, of_row, g == 0, to);
    Scale(sums.v1, scales + 16, of_row, g == 0, to + 16);
    Scale(sums.v2, scales + 32, of_row, g == 0, to + 32);
    Scale(sums.v3, scales + 48, of_row, g == 0, to + 48);
  };
  finish(0, r0);
  finish(1, r1);
  finish(2, r2);
  finish(3, r3);
  finish(4, r4);
  finish(5, r5);
}

template <int kBits>
void MultiplyVnni(const QuantizedRows& x, const void* packed, const QuantizedShape& shape,
                  int64_t block, float* out) {
  constexpr int64_t kAhead = 32 << 10;  // bytes
  const int64_t tiles = (x.rows + kTile - 1) / kTile, steps = tiles * (shape.group / 8);
  const int64_t lines = GroupBytes(shape) / 64;
  const int64_t per_step = FetchesAhead(tiles) ? (lines + steps - 1) / steps : 0;
  for (int64_t g = 0; g < shape.groups(); ++g) {
    const uint8_t* const group = GroupAt(packed, shape, block, g);
    Ahead ahead = {group + kAhead, per_step};
    int64_t row = 0;
    for (; row + kTile <= x.rows; row += kTile) {
      MultiplyTile<kBits, kTile>(x, row, g, group, shape, ahead, out);
    }
    switch (x.rows - row) {
      case 5:
        MultiplyTile<kBits, 5>(x, row, g, group, shape, ahead, out);
        break;
      case 4:
        MultiplyTile<kBits, 4>(x, row, g, group, shape, ahead, out);
        break;
      case 3:
        MultiplyTile<kBits, 3>(x, row, g, group, shape, ahead, out);
        break;
      case 2:
        MultiplyTile<kBits, 2>(x, row, g, group, shape, ahead, out);
        break;
      case 1:
        MultiplyTile<kBits, 1>(x, row, g, group, shape, ahead, out);
        break;
      default:
        break;
    }
  }
}

#pragma GCC pop_options
#endif

void QuantizeRowAnywhere(const float* x, const QuantizedShape& shape, int8_t* values, float* scales,
                         int32_t* sums) {
  for (int64_t g = 0; g < shape.groups(); ++g) {
    const float* const from = x + g * shape.group;
    uint32_t most = 0;  // as bits, of which NaN's are above all others
    for (int64_t i = 0; i < shape.group; ++i) {
      most = std::max(most, std::bit_cast<uint32_t>(from[i]) & 0x7fffffff);
    }
    const auto largest = std::bit_cast<float>(most);
    scales[g] = largest / 127;
    const float by = largest > kLeastRounded ? 127 / largest : 0;
    sums[g] = 0;
    for (int64_t i = 0; i < shape.group; ++i) {
      const auto rounded = std::clamp<int64_t>(std::lrint(from[i] * by), -128, 127);
      values[g * shape.group + i] = static_cast<int8_t>(rounded);
      sums[g] += static_cast<int32_t>(rounded);
    }
  }
}

}  // namespace

int64_t PackedWeightBytes(const QuantizedShape& shape) {
  return QuantizedBlocks(shape) * shape.groups() * GroupBytes(shape);
}

namespace {

// Two quads of an output, of 8 bits as signed integers or of 4 as they are packed in pairs, into
// where the first lies.
void PackQuads(const uint8_t* from, int64_t bits, uint8_t* to) {
  if (bits == 8) {
    for (int64_t i = 0; i < kQuad; ++i) {
      to[i] = from[i] ^ 0x80;
      to[kBlock * kQuad + i] = from[kQuad + i] ^ 0x80;
    }
    return;
  }
  for (int64_t i = 0; i < kQuad; ++i) {
    const int shift = i % 2 * 4;
    const int low = from[i / 2] >> shift & 0xf, high = from[2 + i / 2] >> shift & 0xf;
    to[i] = static_cast<uint8_t>(low | high << 4);
  }
}

}  // namespace

void PackWeightBlock(const void* weights, const uint16_t* scales, const QuantizedShape& shape,
                     int64_t block, void* packed) {
  constexpr int64_t kPair = 2 * kQuad;  // inputs
  const int64_t row_bytes = shape.inputs * shape.bits / 8;
  const int64_t first = block * kBlock, outputs = std::min(kBlock, shape.outputs - first);
  const auto* const rows = static_cast<const uint8_t*>(weights) + first * row_bytes;
  for (int64_t g = 0; g < shape.groups(); ++g) {
    auto* const group = const_cast<uint8_t*>(GroupAt(packed, shape, block, g));
    if (outputs < kBlock) {  // the others are zeros
      std::memset(group, shape.bits == 8 ? 0x80 : 0x88, GroupBytes(shape));
      std::memset(group, 0, kBlock * sizeof(uint16_t));
    }
    for (int64_t o = 0; o < outputs; ++o) {
      std::memcpy(group + o * static_cast<int64_t>(sizeof(uint16_t)),
                  scales + (first + o) * shape.groups() + g, sizeof(uint16_t));
    }
    uint8_t* const integers = group + kBlock * sizeof(uint16_t);
    for (int64_t i = 0; i < shape.group; i += kPair) {
      const int64_t from = (g * shape.group + i) * shape.bits / 8;
      uint8_t* const to = integers + PlaceOf(shape, /*output=*/0, i).byte;
      for (int64_t o = 0; o < outputs; ++o) {
        PackQuads(rows + o * row_bytes + from, shape.bits, to + o * kQuad);
      }
    }
  }
}

void PackWeight(const void* weights, const uint16_t* scales, const QuantizedShape& shape,
                void* packed) {
  for (int64_t block = 0; block < QuantizedBlocks(shape); ++block) {
    PackWeightBlock(weights, scales, shape, block, packed);
  }
}

void UnpackWeight(const void* packed, const QuantizedShape& shape, float* out) {
  for (int64_t output = 0; output < shape.outputs; ++output) {
    const int64_t block = output / kBlock, o = output % kBlock;
    for (int64_t g = 0; g < shape.groups(); ++g) {
      const uint8_t* const group = GroupAt(packed, shape, block, g);
      float* const to = out + output * shape.inputs + g * shape.group;
      for (int64_t i = 0; i < shape.group; ++i) {
        to[i] = ScaleAt(group, o) * static_cast<float>(IntegerAt(group, shape, o, i));
      }
    }
  }
}

absl::string_view QuantizedPathName(QuantizedPath path) {
  switch (path) {
    case QuantizedPath::kAvx512Vnni:
      return "AVX-512 VNNI";
    case QuantizedPath::kAmx:
      return "AMX";
    case QuantizedPath::kSimd:
      return SimdName();
    case QuantizedPath::kNeonDot:
      return "NEON dot";
    case QuantizedPath::kAnywhere:
      break;
  }
  return "plain";
}

std::vector<QuantizedPath> QuantizedPaths() {
  std::vector<QuantizedPath> paths = {QuantizedPath::kAnywhere};
  if (HasSimd()) paths.push_back(QuantizedPath::kSimd);
  if (ThisProcessor().neon_dot) paths.push_back(QuantizedPath::kNeonDot);
  if (ThisProcessor().avx512_vnni) {
    paths.push_back(QuantizedPath::kAvx512Vnni);
    if (ThisProcessor().amx_int8) paths.push_back(QuantizedPath::kAmx);
  }
  return paths;
}

QuantizedPath FastestQuantizedPath() {
  static const QuantizedPath fastest = QuantizedPaths().back();
  return fastest;
}

QuantizedPath FastestQuantizedPath(const QuantizedShape& shape) {
  const QuantizedPath fastest = FastestQuantizedPath();
  const bool fits = fastest != QuantizedPath::kAmx || CanMultiplyTiles(shape);
  return fits ? fastest : QuantizedPath::kAvx512Vnni;
}

void QuantizeRow(QuantizedPath path, const float* x, const QuantizedShape& shape, int64_t row,
                 const QuantizedRows& rows) {
  int8_t* const values = rows.values + row * shape.inputs;
  float* const scales = rows.scales + row * shape.groups();
  int32_t* const sums = rows.sums + row * shape.groups();
  if (path != QuantizedPath::kAnywhere) return QuantizeRowSimd(x, shape, values, scales, sums);
  QuantizeRowAnywhere(x, shape, values, scales, sums);
}

void MultiplyBlock(QuantizedPath path, const QuantizedRows& x, const void* packed,
                   const QuantizedShape& shape, int64_t block, float* out) {
  const uint8_t* const first = GroupAt(packed, shape, block, /*group=*/0);
#ifdef EPIKV_VNNI
  if (path == QuantizedPath::kAmx && x.rows >= kFewestOfTiles && CanMultiplyTiles(shape)) {
    return MultiplyBlockTiles(x, first, shape, out);
  }
  if (path == QuantizedPath::kAvx512Vnni || path == QuantizedPath::kAmx) {
    return shape.bits == 8 ? MultiplyVnni<8>(x, packed, shape, block, out)
                           : MultiplyVnni<4>(x, packed, shape, block, out);
  }
#endif
  if (path == QuantizedPath::kSimd) return MultiplyBlockSimd(x, first, shape, out);
  if (path == QuantizedPath::kNeonDot) return MultiplyBlockNeonDot(x, first, shape, out);
  MultiplyAnywhere(x, packed, shape, block, out);
}

}  // namespace epikv
