#pragma once

#include <cstdint>

#include "runtime/kernels/kernels.h"

// What attend_blocks.inc takes, whatever its instruction set.

namespace epikv {

inline constexpr int64_t kKeysOfVector = 16;
// Of a block: with wide heads, 64 leave no room in the L1 cache.
inline constexpr int64_t kKeysOfBlock = 2 * kKeysOfVector;

inline bool CanAttendBlocks(const LaneShape& shape) {
  return shape.key_width % kKeysOfVector == 0 && shape.value_width % kKeysOfVector == 0;
}

// Floats of scratch for so many rows.
inline int64_t AttendBlocksScratchFloats(const LaneShape& shape, int64_t rows) {
  const int64_t aligned = 8 * kKeysOfVector, queries = rows * shape.group;
  return aligned + (kKeysOfBlock + queries) * shape.key_width +
         queries * (2 * kKeysOfBlock + shape.value_width + kKeysOfVector + 1);
}

}  // namespace epikv
