#pragma once

#include <cstdint>

#include "runtime/kernels/quantized_matmul.h"

// The products of quantized_matmul.h by a matrix unit (tiles.h), with weights of 8 bits. (Of 4 they
// would have to be unpacked in memory, which leaves little to gain.) Sums of integers are exact:
// the bits are those of every other path.

namespace epikv {

// Of 8 bits, whose groups are whole tiles, or less than one.
inline bool CanMultiplyTiles(const QuantizedShape& shape) {
  return shape.bits == 8 && (shape.group <= 64 || shape.group % 64 == 0);
}

// As MultiplyBlock, of the groups of a block, the first at `groups`. Precondition:
// Processor::amx_int8, CanMultiplyTiles.
void MultiplyBlockTiles(const QuantizedRows& x, const uint8_t* groups, const QuantizedShape& shape,
                        float* out);

}  // namespace epikv
