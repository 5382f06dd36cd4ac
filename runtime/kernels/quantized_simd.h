#pragma once

#include <cstdint>

#include "runtime/kernels/quantized_matmul.h"

// The products of quantized_matmul.h in Highway's vectors, for processors with AVX2 or NEON. Sums
// of groups are integers, and groups are added in their order: results are those of every other
// path, to the bit.

namespace epikv {

// As MultiplyBlock. block: where the block's first group begins. Precondition: HasSimd.
void MultiplyBlockSimd(const QuantizedRows& x, const uint8_t* block, const QuantizedShape& shape,
                       float* out);
// The same by NEON's product of four pairs. Precondition: Processor::neon_dot.
void MultiplyBlockNeonDot(const QuantizedRows& x, const uint8_t* block, const QuantizedShape& shape,
                          float* out);

// As QuantizeRow, of one row. Precondition: HasSimd.
void QuantizeRowSimd(const float* x, const QuantizedShape& shape, int8_t* values, float* scales,
                     int32_t* sums);

}  // namespace epikv
