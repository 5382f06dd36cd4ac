#pragma once

#include <ATen/core/Tensor.h>

namespace epikv {

// Products of rows: a [..., m, d], b [n, d] -> [..., m, n]. In fp32 by oneDNN, which torch's matmul
// does not ask: MKL's loops are half as fast or less on processors that are not Intel's.
at::Tensor Products(const at::Tensor& a, const at::Tensor& b);

}  // namespace epikv
