#include "runtime/kernels/dense_amx.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "policies/clones.h"
#include "runtime/kernels/dense_matmul.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,amx-tile,amx-bf16")

#include "runtime/kernels/tiles.h"

namespace epikv {
namespace {

constexpr int64_t kBlock = kDenseBlock;
constexpr int64_t kStep = kTileBytes / 4;                // words that one product of tiles takes
constexpr int64_t kStepWords = kStep * kBlock;           // of all outputs
constexpr int64_t kWordBytes = kBlock * 4;               // of all outputs; also of a row of sums
constexpr int64_t kStepLines = kStep * kWordBytes / 64;  // of all outputs

// Some inputs of rows and of a block of a weight, and the sums of those before them.
struct Operands {
  const char* rows;
  int64_t row_bytes;
  const uint32_t* words;  // [steps x kStep, kBlock]
  int64_t steps;
  bool first;   // no sums yet
  float* sums;  // [rows, kBlock]
};

// A quarter of a step, into the L1 cache.
EPIKV_INLINE void Fetch(const char* step, int quarter) {
#pragma GCC unroll 16
  for (int i = 0; i < kStepLines / 4; ++i) {
    __builtin_prefetch(step + (quarter * kStepLines / 4 + i) * 64);
  }
}

// Up to 16 rows, of all outputs. What is fetched is near: a tile's lines are 256 bytes apart, which
// no prefetcher follows, and farther than that the L1 cache would lose it again.
void MultiplyTile(const Operands& of, int64_t num_rows) {
  constexpr int64_t kAhead = 8 << 10;  // bytes
  const TileScope scope(num_rows);
  float* const sums = of.sums;
  if (of.first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, kWordBytes);
    _tile_loadd(1, sums + 16, kWordBytes);
    _tile_loadd(2, sums + 32, kWordBytes);
    _tile_loadd(3, sums + 48, kWordBytes);
  }
  const char* row = of.rows;
  const uint32_t* words = of.words;
  for (int64_t s = 0; s < of.steps; ++s, row += kTileBytes, words += kStepWords) {
    const char* const ahead = reinterpret_cast<const char*>(words) + kAhead;
    _tile_loadd(4, row, of.row_bytes);
    Fetch(ahead, 0);
    _tile_loadd(5, words, kWordBytes);
    _tile_dpbf16ps(0, 4, 5);
    Fetch(ahead, 1);
    _tile_loadd(6, words + 16, kWordBytes);
    _tile_dpbf16ps(1, 4, 6);
    Fetch(ahead, 2);
    _tile_loadd(7, words + 32, kWordBytes);
    _tile_dpbf16ps(2, 4, 7);
    Fetch(ahead, 3);
    _tile_loadd(5, words + 48, kWordBytes);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, sums, kWordBytes);
  _tile_stored(1, sums + 16, kWordBytes);
  _tile_stored(2, sums + 32, kWordBytes);
  _tile_stored(3, sums + 48, kWordBytes);
}

void Multiply(Operands of, int64_t num_rows) {
  for (; num_rows > 0; num_rows -= kTileRows) {
    MultiplyTile(of, std::min(kTileRows, num_rows));
    of.rows += kTileRows * of.row_bytes;
    of.sums += kTileRows * kBlock;
  }
}

}  // namespace

void MultiplyDenseTiles(const void* rows, int64_t num_rows, int64_t row_bytes,
                        const uint32_t* words, int64_t num_words, float* out) {
  const int64_t steps = num_words / kStep, left = num_words % kStep;
  const auto* const x = static_cast<const char*>(rows);
  if (steps > 0) Multiply({x, row_bytes, words, steps, /*first=*/true, out}, num_rows);
  if (left == 0) return;
  alignas(64) uint32_t rest[kStepWords] = {};
  std::memcpy(rest, words + steps * kStepWords, left * kWordBytes);
  Multiply({x + steps * kTileBytes, row_bytes, rest, /*steps=*/1, steps == 0, out}, num_rows);
}

}  // namespace epikv

#pragma GCC pop_options

#else

namespace epikv {

void MultiplyDenseTiles(const void*, int64_t, int64_t, const uint32_t*, int64_t, float*) {
  std::abort();  // of no processor that this is compiled for
}

}  // namespace epikv

#endif
