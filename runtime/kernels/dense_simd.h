#pragma once

#include <cstdint>

#include "runtime/base/dtype.h"

// The products of dense_matmul.h in Highway's vectors, for processors with AVX2 or NEON. They add
// in the same order as those of AVX-512: their results are the same to the bit. Precondition:
// HasSimd.

namespace epikv {

// As DensePath::kFloat32 and DensePath::kWidened: rows `stride` words apart, words [num_words,
// kDenseBlock] of a block, out [num_rows, kDenseBlock]. dtype: of the weight, bfloat16 or float16.
void MultiplyFloat32Simd(const float* x, int64_t num_rows, const uint32_t* words, int64_t num_words,
                         int64_t stride, float* out);
void MultiplyWidenedSimd(DType dtype, const float* x, int64_t num_rows, const uint32_t* words,
                         int64_t pairs, int64_t stride, float* out);

}  // namespace epikv
