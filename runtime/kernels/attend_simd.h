#pragma once

#include "runtime/kernels/kernels.h"

// Attention by blocks (attend_blocks.inc) in Highway's vectors, for processors with AVX2 or NEON.

namespace epikv {

// Whether this processor can. Widths are to be multiples of 16.
bool CanAttendSimd(const LaneShape& shape);

// What DecodeAttention and PrefillAttention promise. Precondition: CanAttendSimd.
void DecodeSimd(const DecodeLane& lane, const LaneShape& shape, float* scratch);
void PrefillSimd(const PrefillLane& lane, const LaneShape& shape, float* scratch);

}  // namespace epikv
