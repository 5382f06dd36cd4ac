#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/strings/string_view.h"
#include "runtime/base/dtype.h"

// Products with weights of any DType, without torch, for processors with a matrix unit, AVX-512,
// AVX2 or NEON. Others' are bound by what few rows leave idle and, of bfloat16 where there is no
// matrix unit, by the dot instruction, which Intel's processors run at half the speed of fp32, or
// by having none. Sums are fp32, in the order of the inputs but in a matrix unit (dense_amx.h): a
// row's result does not depend on the rows beside it, and in fp32 not on the width of a vector.

namespace epikv {

struct DenseShape {
  int64_t outputs = 0, inputs = 0;
  DType dtype = DType::kFloat32;  // of the weight and of x
};

// Outputs that lie together in a packed weight, and are multiplied together.
inline constexpr int64_t kDenseBlock = 64;
inline int64_t DenseBlocks(const DenseShape& shape) {
  return (shape.outputs + kDenseBlock - 1) / kDenseBlock;
}

int64_t PackedDenseBytes(const DenseShape& shape);

// weight [outputs, inputs]. packed: aligned to 64. Or one block of it: threads may divide them.
void PackDense(const void* weight, const DenseShape& shape, void* packed);
void PackDenseBlock(const void* weight, const DenseShape& shape, int64_t block, void* packed);
// Bit for bit.
void UnpackDense(const void* packed, const DenseShape& shape, void* weight);

// What the products are written for: float32; of the narrow ones fp32 as well, to which both sides
// are widened; or, of bfloat16, the processor's product of pairs, or of tiles. With AVX-512; or,
// "Simd", with AVX2 or NEON.
enum class DensePath { kFloat32, kWidened, kPaired, kFloat32Simd, kWidenedSimd, kTiled };
absl::string_view DensePathName(DensePath path);
// Those of a dtype that this processor has, the fastest last; none without AVX2 or NEON.
std::vector<DensePath> DensePaths(DType dtype);
// nullopt: there is none.
std::optional<DensePath> FastestDensePath(DType dtype);

// Rows that one call of MultiplyDense multiplies well: their sums stay in the caches.
inline constexpr int64_t kDenseRows = 96;

// Rows of x as a path reads them, each of so many bytes. Memory aligned to 64.
int64_t DenseRowBytes(DensePath path, const DenseShape& shape);
void PrepareDense(DensePath path, const void* x, const DenseShape& shape, void* row);

// Outputs of a block, those from block x kDenseBlock on, of x weight^T: out [num_rows,
// kDenseBlock]; at least one row. Those beyond `outputs` are 0. Fetches what is read next, of this
// block or the one behind it, into the caches.
void MultiplyDense(DensePath path, const void* rows, int64_t num_rows, const void* packed,
                   const DenseShape& shape, int64_t block, float* out);

}  // namespace epikv
