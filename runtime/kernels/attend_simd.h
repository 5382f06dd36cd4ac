#pragma once

#include "runtime/kernels/kernels.h"

// Attention by blocks (attend_blocks.inc) in Highway's vectors, for processors with AVX2 or NEON.

namespace epikv {

// Whether this processor can. Widths are to be multiples of 16.
bool CanAttendSimd(const LaneShape& shape);

// What PrefillAttention, AttendPart and JoinParts promise. left: DecodeLane::logits, of one row, or
// null. Precondition: CanAttendSimd.
void AttendSimd(const PrefillLane& lane, const LaneShape& shape, float* left, float* scratch);

}  // namespace epikv
