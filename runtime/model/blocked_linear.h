#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "absl/functional/function_ref.h"

// What our own products have in common: outputs in blocks, which threads divide, and rows in
// groups, whose sums stay in the caches.

namespace epikv {

struct BlockedLinear {
  const char* name;  // of the operator, for errors
  int64_t inputs = 0, outputs = 0;
  int64_t block = 0;  // outputs of one
  int64_t rows = 0;   // of a group, at most

  // Makes row `row` ready, of elements of x's dtype. On any thread.
  using Prepare = absl::FunctionRef<void(const void* from, int64_t row)>;
  // sums [count, block] of rows [first, first + count). On any thread.
  using Multiply =
      absl::FunctionRef<void(int64_t first, int64_t count, int64_t of_block, float* sums)>;

  // Throws c10::Error if x is not [..., inputs] of a floating-point type that kernels.h knows, or
  // bias not fp32 [outputs].
  void Check(const at::Tensor& x, const std::optional<at::Tensor>& bias) const;

  // x [..., inputs] -> [..., outputs], of x's dtype. Has all rows prepared, then multiplied.
  at::Tensor Run(const at::Tensor& x, const std::optional<at::Tensor>& bias, Prepare prepare,
                 Multiply multiply) const;
};

}  // namespace epikv
