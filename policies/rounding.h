#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace epikv {

// Rows of K and V as a store of few bits a number gives them back (ThinKV, arXiv 2510.01290, TBQ:
// K by channel, V by token, groups of 16). A group of numbers has one scale, in bfloat16. A number
// is an integer times the scale: of 8 bits from -127 to 127, of 4 from -7 to 7, scale = max |x|
// over the largest one. Of 2 bits it is -1, 0 or 1: 0 where |x| is at most .7 of the group's mean
// |x|, and the scale is the mean |x| of the others (arXiv 1605.04711, section 3.2). The paper has
// NVFP4 for 4 bits, and does not say how 2 are rounded.
inline constexpr int64_t kRoundingGroup = 16;

// rows: fp32 [tokens, width], tokens of one group. bits: 2, 4 or 8. A group with a number that is
// not finite becomes NaN.
at::Tensor RoundedKeys(const at::Tensor& rows, int64_t bits);
at::Tensor RoundedValues(const at::Tensor& rows, int64_t bits);

// What is left of a group takes, packed: `rows` rows of K and V with their scales, one for each
// channel of K, and one for every 16 channels of each V.
double PackedBytes(int64_t rows, int64_t key_width, int64_t value_width, int64_t bits);

}  // namespace epikv
