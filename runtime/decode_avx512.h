#pragma once

#include <cstdint>

#include "runtime/kernels.h"

// DecodeAttention where the processor has AVX-512: blocks of 32 keys, transposed once for all
// queries of the group, so that a vector's elements are keys and no sum runs across one.

namespace epikv {

// Whether this processor, and this compiler, can. Widths are to be multiples of 16.
bool CanDecodeAvx512(const DecodeShape& shape);
// The same by products of bfloat16 pairs, which AVX512_BF16 sums in fp32; probabilities are rounded
// to bfloat16 before they meet V. Of bfloat16 lanes, V's width a multiple of 32.
bool CanDecodeAvx512BFloat16(const DecodeShape& shape);

// Floats of scratch of either.
int64_t DecodeAvx512ScratchFloats(const DecodeShape& shape);

// What DecodeAttention promises. Precondition: CanDecodeAvx512, CanDecodeAvx512BFloat16.
void DecodeAvx512(const DecodeLane& lane, const DecodeShape& shape, float* scratch);
void DecodeAvx512BFloat16(const DecodeLane& lane, const DecodeShape& shape, float* scratch);

}  // namespace epikv
