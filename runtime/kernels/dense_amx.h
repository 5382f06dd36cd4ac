#pragma once

#include <cstdint>

// The products of dense_matmul.h by a matrix unit (tiles.h).

namespace epikv {

// As DensePath::kTiled: rows of bfloat16 `row_bytes` apart, zeros up to a multiple of 64 bytes;
// words [num_words, kDenseBlock] of a block; out [num_rows, kDenseBlock]. Of every 32 inputs the
// unit sums the even ones and the odd ones, each in their order, and adds both to what it has.
// Denormals are zeros. Precondition: Processor::amx_bf16.
void MultiplyDenseTiles(const void* rows, int64_t num_rows, int64_t row_bytes,
                        const uint32_t* words, int64_t num_words, float* out);

}  // namespace epikv
