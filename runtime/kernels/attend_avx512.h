#pragma once

#include <cstdint>

#include "runtime/kernels/kernels.h"

// Attention where the processor has AVX-512: blocks of 32 keys, transposed once for all queries, so
// that a vector's elements are keys and no sum runs across one.

namespace epikv {

// Whether this processor, and this compiler, can. Widths are to be multiples of 16.
bool CanAttendAvx512(const LaneShape& shape);
// The same by products of bfloat16 pairs, which AVX512_BF16 sums in fp32; probabilities are rounded
// to bfloat16 before they meet V. Of bfloat16 models, V's width a multiple of 32.
bool CanAttendAvx512BFloat16(const LaneShape& shape);

// Floats of scratch for so many rows, of either.
int64_t AttendAvx512ScratchFloats(const LaneShape& shape, int64_t rows);

// What DecodeAttention and PrefillAttention promise. Precondition: CanAttendAvx512,
// CanAttendAvx512BFloat16.
void DecodeAvx512(const DecodeLane& lane, const LaneShape& shape, float* scratch);
void DecodeAvx512BFloat16(const DecodeLane& lane, const LaneShape& shape, float* scratch);
void PrefillAvx512(const PrefillLane& lane, const LaneShape& shape, float* scratch);
void PrefillAvx512BFloat16(const PrefillLane& lane, const LaneShape& shape, float* scratch);

}  // namespace epikv
