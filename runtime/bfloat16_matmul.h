#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/strings/string_view.h"

// Products with weights of bfloat16, without torch, for processors with AVX-512 that have no matrix
// unit: oneDNN's are bound by the dot instruction, which Intel's processors run at half the speed
// of fp32, and by what few rows leave idle. Sums are fp32, in the order of the inputs: a row's
// result does not depend on the rows beside it.

namespace epikv {

struct BFloat16Shape {
  int64_t outputs = 0, inputs = 0;
};

// Outputs that lie together in a packed weight, and are multiplied together.
inline constexpr int64_t kBFloat16Block = 64;
inline int64_t BFloat16Blocks(const BFloat16Shape& shape) {
  return (shape.outputs + kBFloat16Block - 1) / kBFloat16Block;
}

int64_t PackedBFloat16Bytes(const BFloat16Shape& shape);

// weight [outputs, inputs]. packed: aligned to 64.
void PackBFloat16(const uint16_t* weight, const BFloat16Shape& shape, void* packed);
// Bit for bit.
void UnpackBFloat16(const void* packed, const BFloat16Shape& shape, uint16_t* weight);

// What the products are written for: fp32, to which both sides are widened, or the processor's
// product of pairs.
enum class BFloat16Path { kWidened, kPaired };
absl::string_view BFloat16PathName(BFloat16Path path);
// Those that this processor has, the fastest last; none without AVX-512.
std::vector<BFloat16Path> BFloat16Paths();
// nullopt: oneDNN is faster, as with a matrix unit.
std::optional<BFloat16Path> FastestBFloat16Path();

// Rows that one call of MultiplyBFloat16 multiplies well: their sums stay in the caches.
inline constexpr int64_t kBFloat16Rows = 96;

// Rows of x as a path reads them, each of so many bytes. Memory aligned to 64.
int64_t BFloat16RowBytes(BFloat16Path path, const BFloat16Shape& shape);
void PrepareBFloat16(BFloat16Path path, const uint16_t* x, const BFloat16Shape& shape, void* row);

// Outputs of a block, those from block x kBFloat16Block on, of x weight^T: out [num_rows,
// kBFloat16Block]. Those beyond `outputs` are 0. Fetches the block behind it into the caches.
void MultiplyBFloat16(BFloat16Path path, const void* rows, int64_t num_rows, const void* packed,
                      const BFloat16Shape& shape, int64_t block, float* out);

}  // namespace epikv
