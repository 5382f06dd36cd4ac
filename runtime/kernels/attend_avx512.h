#pragma once

#include <cstdint>

#include "runtime/kernels/kernels.h"

// Attention by blocks (attend_blocks.inc) where the processor has AVX-512.

namespace epikv {

// Whether this processor, and this compiler, can. Widths are to be multiples of 16.
bool CanAttendAvx512(const LaneShape& shape);
// The same by products of bfloat16 pairs, which AVX512_BF16 sums in fp32; probabilities are rounded
// to bfloat16 before they meet V. Of bfloat16 models, V's width a multiple of 32.
bool CanAttendAvx512BFloat16(const LaneShape& shape);

// What DecodeAttention and PrefillAttention promise. Precondition: CanAttendAvx512,
// CanAttendAvx512BFloat16.
void DecodeAvx512(const DecodeLane& lane, const LaneShape& shape, float* scratch);
void DecodeAvx512BFloat16(const DecodeLane& lane, const LaneShape& shape, float* scratch);
void PrefillAvx512(const PrefillLane& lane, const LaneShape& shape, float* scratch);
void PrefillAvx512BFloat16(const PrefillLane& lane, const LaneShape& shape, float* scratch);

}  // namespace epikv
