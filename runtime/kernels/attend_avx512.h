#pragma once

#include <cstdint>

#include "runtime/kernels/kernels.h"

// Attention by blocks (attend_blocks.inc) where the processor has AVX-512, or a matrix unit too.

namespace epikv {

// Whether this processor, and this compiler, can. Widths are to be multiples of 16.
bool CanAttendAvx512(const LaneShape& shape);
// The same by products of bfloat16 pairs, which AVX512_BF16 sums in fp32; probabilities are rounded
// to bfloat16 before they meet V. Of bfloat16 models, V's width a multiple of 32.
bool CanAttendAvx512BFloat16(const LaneShape& shape);
// And by a matrix unit's products of tiles of such pairs. Widths multiples of 32.
bool CanAttendAmx(const LaneShape& shape);

// What PrefillAttention, AttendPart and JoinParts promise. left: DecodeLane::logits, of one row, or
// null. Precondition: CanAttendAvx512, CanAttendAvx512BFloat16, CanAttendAmx.
void AttendAvx512(const PrefillLane& lane, const LaneShape& shape, float* left, float* scratch);
void AttendAvx512BFloat16(const PrefillLane& lane, const LaneShape& shape, float* left,
                          float* scratch);
void AttendAmx(const PrefillLane& lane, const LaneShape& shape, float* left, float* scratch);

}  // namespace epikv
