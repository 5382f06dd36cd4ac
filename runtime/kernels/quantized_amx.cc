#include "runtime/kernels/quantized_amx.h"

#include <algorithm>
#include <cstdlib>

#include "policies/clones.h"
#include "runtime/kernels/quantized_matmul.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,amx-tile,amx-int8")

#include "runtime/kernels/tiles.h"

namespace epikv {
namespace {

constexpr int64_t kBlock = kQuantizedBlock;
constexpr int64_t kQuadBytes = kBlock * 4;  // of all outputs; as many as of a row of sums
constexpr int64_t kScaleBytes = kBlock * sizeof(uint16_t);

// What is fetched is near, as in dense_amx.cc.
EPIKV_INLINE void Fetch(const uint8_t* group, int64_t bytes) {
  constexpr int64_t kAhead = 8 << 10;
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(group + kAhead + at);
}

// Integer sums of up to 16 rows in a group of `steps` x `quads` quads.
EPIKV_INLINE void SumTile(const int8_t* values, int64_t row_bytes, const uint8_t* weights,
                          int64_t steps, int64_t quads, int32_t* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t s = 0; s < steps; ++s, values += quads * 4, weights += quads * kQuadBytes) {
    _tile_loadd(4, values, row_bytes);
    _tile_loadd(5, weights, kQuadBytes);
    _tile_dpbsud(0, 4, 5);
    _tile_loadd(6, weights + 64, kQuadBytes);
    _tile_dpbsud(1, 4, 6);
    _tile_loadd(7, weights + 128, kQuadBytes);
    _tile_dpbsud(2, 4, 7);
    _tile_loadd(5, weights + 192, kQuadBytes);
    _tile_dpbsud(3, 4, 5);
  }
  _tile_stored(0, sums, kQuadBytes);
  _tile_stored(1, sums + 16, kQuadBytes);
  _tile_stored(2, sums + 32, kQuadBytes);
  _tile_stored(3, sums + 48, kQuadBytes);
}

// out [kBlock] += scale of the group x scale of the row x (sums - above): what weights stand above
// zero is in sums.
EPIKV_INLINE void AddScaled(const int32_t* sums, int32_t above, const __m512 (&scales)[4],
                            float of_row, bool first, float* out) {
  for (int64_t v = 0; v < 4; ++v, sums += 16, out += 16) {
    const __m512i exact = _mm512_sub_epi32(_mm512_load_si512(sums), _mm512_set1_epi32(above));
    const __m512 before = first ? _mm512_setzero_ps() : _mm512_loadu_ps(out);
    const __m512 factor = _mm512_mul_ps(scales[v], _mm512_set1_ps(of_row));
    _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), factor, before));
  }
}

}  // namespace

void MultiplyBlockTiles(const QuantizedRows& x, const uint8_t* groups, const QuantizedShape& shape,
                        float* out) {
  constexpr int32_t kZero = 128;
  const int64_t quads = shape.group / 4, of_tile = std::min(quads, kTileRows);
  const int64_t group_bytes = kScaleBytes + quads * kQuadBytes;
  alignas(64) int32_t sums[kTileRows * kBlock];
  for (int64_t row = 0; row < x.rows; row += kTileRows) {
    const int64_t count = std::min(kTileRows, x.rows - row);
    const TileScope scope(count, of_tile);
    const uint8_t* group = groups;
    for (int64_t g = 0; g < shape.groups(); ++g, group += group_bytes) {
      Fetch(group, group_bytes);
      SumTile(x.values + row * shape.inputs + g * shape.group, shape.inputs, group + kScaleBytes,
              quads / of_tile, of_tile, sums);
      __m512 scales[4];
      for (int64_t v = 0; v < 4; ++v) {
        const auto* const narrow = reinterpret_cast<const __m256i*>(group) + v;
        scales[v] = _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(narrow)), 16));
      }
      for (int64_t r = 0; r < count; ++r) {
        const int64_t at = (row + r) * shape.groups() + g;
        AddScaled(sums + r * kBlock, x.sums[at] * kZero, scales, x.scales[at], g == 0,
                  out + (row + r) * kBlock);
      }
    }
  }
}

}  // namespace epikv

#pragma GCC pop_options
#else

namespace epikv {

void MultiplyBlockTiles(const QuantizedRows&, const uint8_t*, const QuantizedShape&, float*) {
  std::abort();  // of no processor that this is compiled for
}

}  // namespace epikv

#endif
