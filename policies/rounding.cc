#include "policies/rounding.h"

#include <ATen/ATen.h>

namespace epikv {
namespace {

// groups: [..., group], each rounded by itself.
at::Tensor Rounded(const at::Tensor& groups, int64_t bits) {
  const at::Tensor size = groups.abs();
  at::Tensor scale, integers;
  if (bits == 2) {
    const at::Tensor large = size > 0.7 * size.mean(-1, /*keepdim=*/true);
    scale = (size * large).sum(-1, /*keepdim=*/true) / large.sum(-1, /*keepdim=*/true).clamp_min(1);
    scale = scale.to(at::kBFloat16).to(at::kFloat);
    integers = groups.sign() * large;
  } else {
    const double largest = static_cast<double>((int64_t{1} << (bits - 1)) - 1);
    scale = (size.amax(-1, /*keepdim=*/true) / largest).to(at::kBFloat16).to(at::kFloat);
    integers = (groups / scale.clamp_min(1e-38)).round().clamp(-largest, largest);
  }
  // Not beyond the largest number: a dtype ends somewhere.
  const at::Tensor most = size.amax(-1, /*keepdim=*/true);
  const at::Tensor rounded = at::minimum(at::maximum(integers * scale, -most), most);
  // Beside a number that is not finite nothing can be told of the others.
  return rounded + (size.sum(-1, /*keepdim=*/true) * 0);
}

}  // namespace

at::Tensor RoundedKeys(const at::Tensor& rows, int64_t bits) {
  return Rounded(rows.t(), bits).t().contiguous();
}

at::Tensor RoundedValues(const at::Tensor& rows, int64_t bits) {
  const int64_t width = rows.size(1);
  const int64_t whole = width - width % kRoundingGroup;
  at::Tensor rounded = at::empty_like(rows);
  if (whole > 0) {
    const at::Tensor groups = rows.narrow(1, 0, whole).reshape({rows.size(0), -1, kRoundingGroup});
    rounded.narrow(1, 0, whole).copy_(Rounded(groups, bits).reshape({rows.size(0), whole}));
  }
  if (whole < width) {
    const at::Tensor rest = rows.narrow(1, whole, width - whole);
    rounded.narrow(1, whole, width - whole).copy_(Rounded(rest, bits));
  }
  return rounded;
}

double PackedBytes(int64_t rows, int64_t key_width, int64_t value_width, int64_t bits) {
  constexpr int64_t kScaleBits = 16;
  const int64_t value_groups = (value_width + kRoundingGroup - 1) / kRoundingGroup;
  const int64_t scales = key_width + rows * value_groups;
  return static_cast<double>(rows * (key_width + value_width) * bits + scales * kScaleBits) / 8;
}

}  // namespace epikv
