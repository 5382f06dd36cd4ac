#pragma once

#include <cstdint>

#include "runtime/kernels/kernels.h"

// What attend_blocks.inc takes, whatever its instruction set.

namespace epikv {

inline constexpr int64_t kKeysOfVector = 16;
inline constexpr int64_t kQueriesOfTile = 16;  // of a matrix unit
// Of a block: with wide heads, 64 leave no room in the L1 cache.
inline constexpr int64_t kKeysOfBlock = 2 * kKeysOfVector;

inline bool CanAttendBlocks(const LaneShape& shape) {
  return shape.key_width % kKeysOfVector == 0 && shape.value_width % kKeysOfVector == 0;
}

// Floats of scratch for so many rows, by any path.
inline int64_t AttendBlocksScratchFloats(const LaneShape& shape, int64_t rows) {
  const int64_t aligned = 12 * kKeysOfVector;
  const int64_t queries = rows * shape.group + kQueriesOfTile - 1;
  return aligned + (kKeysOfBlock + queries) * shape.key_width +
         (kKeysOfBlock / 2 + 1) * shape.value_width +
         queries * (2 * kKeysOfBlock + 2 * shape.value_width + 2 * kKeysOfVector + 1);
}

// What a query's attention to some slots comes to: its values' weighted sum [width], its largest
// logit, and its sum of exp(logit - largest). Adds that of a part to that of the parts before it.
// In one place: the bits are to be the same whoever joins.
void AddPart(const float* part, int64_t width, float* total);

}  // namespace epikv
