#pragma once

#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"

// Products with weights of 8 or 4 bits, without torch. Weights are symmetric integers in groups of
// neighbouring inputs, each with a scale, as llama.cpp's Q8_0 and Q4_0 have them; x is rounded to 8
// bits in the same groups, row by row, so that groups are summed in integers. A row's result does
// not depend on the rows beside it.

namespace epikv {

struct QuantizedShape {
  int64_t outputs = 0, inputs = 0;
  int64_t group = 0;  // inputs that share a scale: a multiple of 8 that divides `inputs`
  int64_t bits = 8;   // or 4
  int64_t groups() const { return inputs / group; }
};

// Outputs that lie together in a packed weight, and are multiplied together.
inline constexpr int64_t kQuantizedBlock = 64;
inline int64_t QuantizedBlocks(const QuantizedShape& shape) {
  return (shape.outputs + kQuantizedBlock - 1) / kQuantizedBlock;
}

int64_t PackedWeightBytes(const QuantizedShape& shape);

// weights: int8 [outputs, inputs]; of 4 bits uint8 [outputs, inputs / 2], two in a byte, the first
// in the lower half, 8 standing for 0. scales: bfloat16 [outputs, groups]. packed: aligned to 64.
void PackWeight(const void* weights, const uint16_t* scales, const QuantizedShape& shape,
                void* packed);
// The same of one block: threads may divide them.
void PackWeightBlock(const void* weights, const uint16_t* scales, const QuantizedShape& shape,
                     int64_t block, void* packed);

// The weight that a packed one stands for: out [outputs, inputs].
void UnpackWeight(const void* packed, const QuantizedShape& shape, float* out);

// Groups of x whose largest is no larger are zeros: 127 over it would be no number.
inline constexpr float kLeastRounded = 1e-36f;

// Rows that one call of MultiplyBlock multiplies well: their sums stay in the caches.
inline constexpr int64_t kQuantizedRows = 96;

// Rows of x, rounded: x is near values x scale, in each group.
struct QuantizedRows {
  int64_t rows = 0;
  int8_t* values = nullptr;  // [rows, inputs]
  float* scales = nullptr;   // [rows, groups]
  int32_t* sums = nullptr;   // [rows, groups], of values
};

// What the products are written for. All give the same bits. kSimd: with AVX2 or NEON. kAmx: by a
// matrix unit; of few rows, of 4 bits, or of groups that do not fill its tiles, as kAvx512Vnni.
enum class QuantizedPath { kAnywhere, kSimd, kNeonDot, kAvx512Vnni, kAmx };
absl::string_view QuantizedPathName(QuantizedPath path);
// Those that this processor has, the fastest last.
std::vector<QuantizedPath> QuantizedPaths();
QuantizedPath FastestQuantizedPath();
QuantizedPath FastestQuantizedPath(const QuantizedShape& shape);

// x [inputs] becomes row `row`.
void QuantizeRow(QuantizedPath path, const float* x, const QuantizedShape& shape, int64_t row,
                 const QuantizedRows& rows);
inline void QuantizeRow(const float* x, const QuantizedShape& shape, int64_t row,
                        const QuantizedRows& rows) {
  QuantizeRow(FastestQuantizedPath(), x, shape, row, rows);
}

// Outputs of a block, those from block x kQuantizedBlock on, of x weight^T, in fp32: out [rows,
// kQuantizedBlock]; at least one row. Those beyond `outputs` are 0. Fetches what is read next, of
// this block or the one behind it, into the caches.
void MultiplyBlock(QuantizedPath path, const QuantizedRows& x, const void* packed,
                   const QuantizedShape& shape, int64_t block, float* out);

}  // namespace epikv
