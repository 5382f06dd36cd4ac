#include "runtime/model/blocked_linear.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "runtime/base/parallel_for.h"
#include "runtime/base/scalar_type.h"
#include "runtime/kernels/kernels.h"

namespace epikv {
namespace {

bool IsFloat(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16 ||
         x.scalar_type() == at::kHalf;
}

}  // namespace

void BlockedLinear::Check(const at::Tensor& x, const std::optional<at::Tensor>& bias) const {
  TORCH_CHECK(x.device().is_cpu() && IsFloat(x) && x.dim() > 0 && x.size(-1) == inputs, name,
              ": x is ", x.scalar_type(), x.sizes(), ", the weight [", outputs, ", ", inputs, "]");
  TORCH_CHECK(!bias.has_value() || (bias->scalar_type() == at::kFloat && bias->dim() == 1 &&
                                    bias->size(0) == outputs),
              name, ": the bias is ", bias->scalar_type(), bias->sizes(), ", the weight [", outputs,
              ", ", inputs, "]");
}

at::Tensor BlockedLinear::Run(const at::Tensor& x, const std::optional<at::Tensor>& bias,
                              Prepare prepare, Multiply multiply) const {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = outputs;
  at::Tensor result = at::empty(sizes, x.options());
  if (x.numel() == 0) return result;
  const at::Tensor in = x.reshape({-1, inputs}).contiguous();
  const at::Tensor added = bias.has_value() ? bias->contiguous() : at::Tensor();
  const float* const biases = added.defined() ? added.const_data_ptr<float>() : nullptr;
  const int64_t num_rows = in.size(0);
  const auto element = static_cast<int64_t>(x.element_size());

  const auto* const from = static_cast<const char*>(in.const_data_ptr());
  constexpr int64_t kElements = 16384;  // that are worth a thread
  at::parallel_for(0, num_rows, std::max<int64_t>(1, kElements / inputs),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t row = begin; row < end; ++row) {
                       prepare(from + row * inputs * element, row);
                     }
                   });

  auto* const out = static_cast<char*>(result.mutable_data_ptr());
  const DType dtype = DTypeOf(x.scalar_type());
  // Products that are worth a thread; reading a weight takes as long as multiplying it by 8 rows.
  constexpr int64_t kProducts = int64_t{1} << 22;
  const int64_t of_block = (num_rows + 8) * inputs * block;
  ParallelFor((outputs + block - 1) / block, std::max<int64_t>(1, kProducts / of_block),
              [&](int64_t first_block, int64_t last_block) {
                thread_local std::vector<float> memory;
                memory.resize(rows * block);
                for (int64_t b = first_block; b < last_block; ++b) {
                  const int64_t output = b * block, count = std::min(block, outputs - output);
                  for (int64_t first = 0; first < num_rows; first += rows) {
                    const int64_t many = std::min(rows, num_rows - first);
                    multiply(first, many, b, memory.data());
                    for (int64_t r = 0; r < many; ++r) {
                      float* const sums = memory.data() + r * block;
                      for (int64_t i = 0; biases != nullptr && i < count; ++i)
                        sums[i] += biases[output + i];
                      FromFloat(sums, out + ((first + r) * outputs + output) * element, count,
                                dtype);
                    }
                  }
                }
              });
  return result;
}

}  // namespace epikv
