#pragma once

#include <immintrin.h>

#include <cstdint>

#include "policies/clones.h"

// The registers of a matrix unit (Intel's AMX): eight tiles of up to 16 rows of 64 bytes. One
// product of tiles adds to each of 16 x 16 sums the products of 32 pairs of bfloat16, or 64 of
// bytes: of rows of a, and of b, in which a word of 32 bits holds inputs that are neighbours, 16
// outputs' words a row. Included where the instruction set is chosen.

namespace epikv {

inline constexpr int64_t kTileRows = 16, kTileBytes = 64;  // bytes of a row

// The shapes of the tiles, as the processor reads them.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

// What is written to memory before it, tiles read behind it: GCC's loads of tiles and of their
// shapes do not tell the compiler all that they read.
EPIKV_INLINE void TileFence() { asm volatile("" ::: "memory"); }

// From here to its end this thread has tiles: 0 to 3 for sums, of `rows` rows; 4 for what is
// multiplied, as many rows of `words` words; 5 to 7 for weights, `words` rows.
class TileScope {
 public:
  EPIKV_INLINE explicit TileScope(int64_t rows, int64_t words = kTileRows) {
    TileShapes shapes;
    for (int i = 0; i < 8; ++i) {
      shapes.rows[i] = static_cast<uint8_t>(i < 5 ? rows : words);
      shapes.row_bytes[i] = static_cast<uint16_t>(i == 4 ? words * 4 : kTileBytes);
    }
    TileFence();
    _tile_loadconfig(&shapes);
    TileFence();
  }
  EPIKV_INLINE ~TileScope() { _tile_release(); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

}  // namespace epikv
