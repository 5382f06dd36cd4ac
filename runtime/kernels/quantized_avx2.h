#pragma once

#include <cstdint>

#include "runtime/kernels/quantized_matmul.h"

// The products of quantized_matmul.h for processors with AVX2 and FMA. Sums of groups are integers,
// and groups are added in their order: results are those of every other path, to the bit.

namespace epikv {

// Whether this build and this processor have them.
bool HasAvx2QuantizedProducts();

// As MultiplyBlock. block: where the block's first group begins.
void MultiplyBlockAvx2(const QuantizedRows& x, const uint8_t* block, const QuantizedShape& shape,
                       float* out);

// As QuantizeRow, of one row.
void QuantizeRowAvx2(const float* x, const QuantizedShape& shape, int8_t* values, float* scales,
                     int32_t* sums);

}  // namespace epikv
