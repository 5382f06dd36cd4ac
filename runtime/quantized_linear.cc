#include "runtime/quantized_linear.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "runtime/kernels.h"
#include "runtime/scalar_type.h"

namespace epikv {
namespace {

QuantizedShape ShapeOf(const at::Tensor& weight, const at::Tensor& scale) {
  const bool bytes = weight.scalar_type() == at::kChar;
  TORCH_CHECK((bytes || weight.scalar_type() == at::kByte) && weight.dim() == 2 &&
                  scale.scalar_type() == at::kBFloat16 && scale.dim() == 2 &&
                  scale.size(0) == weight.size(0) && scale.size(1) > 0,
              "epikv::quantized_linear: the weight is ", weight.scalar_type(), " ", weight.sizes(),
              ", the scale ", scale.scalar_type(), " ", scale.sizes(),
              ": not int8 [out, in] or uint8 [out, in / 2], and bfloat16 [out, groups]");
  const int64_t inputs = weight.size(1) * (bytes ? 1 : 2), groups = scale.size(1);
  TORCH_CHECK(inputs % (8 * groups) == 0, "epikv::quantized_linear: ", inputs, " inputs in ",
              groups, " groups: not groups of a multiple of 8");
  return {
      .outputs = weight.size(0), .inputs = inputs, .group = inputs / groups, .bits = bytes ? 8 : 4};
}

bool IsFloat(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16 ||
         x.scalar_type() == at::kHalf;
}

// Memory that a thread keeps from one call to the next.
template <class T>
T* Scratch(std::vector<T>& memory, int64_t count) {
  if (memory.size() < static_cast<size_t>(count)) memory.resize(count);
  return memory.data();
}

// x [rows, in] rounded, in memory of the calling thread, until its next call.
QuantizedRows Quantize(const at::Tensor& x, const QuantizedShape& shape) {
  thread_local std::vector<int8_t> values;
  thread_local std::vector<float> scales;
  thread_local std::vector<int32_t> sums;
  const int64_t rows = x.size(0), groups = shape.groups();
  const QuantizedRows result = {.rows = rows,
                                .values = Scratch(values, rows * shape.inputs),
                                .scales = Scratch(scales, rows * groups),
                                .sums = Scratch(sums, rows * groups)};
  const auto* const data = static_cast<const char*>(x.const_data_ptr());
  const int64_t row_bytes = shape.inputs * static_cast<int64_t>(x.element_size());
  constexpr int64_t kGrain = 16384;  // elements that are worth a thread
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / shape.inputs),
                   [&](int64_t begin, int64_t end) {
                     thread_local std::vector<float> wide;
                     float* const row = Scratch(wide, shape.inputs);
                     for (int64_t r = begin; r < end; ++r) {
                       ToFloat(data + r * row_bytes, row, shape.inputs, DTypeOf(x.scalar_type()));
                       QuantizeRow(row, shape, r, result);
                     }
                   });
  return result;
}

QuantizedRows Some(const QuantizedRows& x, const QuantizedShape& shape, int64_t begin,
                   int64_t rows) {
  return {.rows = rows,
          .values = x.values + begin * shape.inputs,
          .scales = x.scales + begin * shape.groups(),
          .sums = x.sums + begin * shape.groups()};
}

// Of weights that are no constants, which the loader could not pack: the same bits, packed anew.
at::Tensor QuantizedLinear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale,
                           const std::optional<at::Tensor>& bias) {
  return PackedQuantizedWeight(weight, scale).Apply(x, bias);
}

at::Tensor PackedQuantizedLinear(const at::Tensor& x,
                                 const c10::intrusive_ptr<PackedQuantizedWeight>& weight,
                                 const std::optional<at::Tensor>& bias) {
  return weight->Apply(x, bias);
}

}  // namespace

PackedQuantizedWeight::PackedQuantizedWeight(const at::Tensor& weight, const at::Tensor& scale)
    : shape_(ShapeOf(weight, scale)), packed_(at::empty({PackedWeightBytes(shape_)}, at::kByte)) {
  const at::Tensor integers = weight.contiguous(), scales = scale.contiguous();
  PackWeight(integers.const_data_ptr(),
             reinterpret_cast<const uint16_t*>(scales.const_data_ptr<at::BFloat16>()), shape_,
             packed_.mutable_data_ptr());
}

at::Tensor PackedQuantizedWeight::Apply(const at::Tensor& x,
                                        const std::optional<at::Tensor>& bias) const {
  TORCH_CHECK(x.device().is_cpu() && IsFloat(x) && x.dim() > 0 && x.size(-1) == shape_.inputs,
              "epikv::quantized_linear: x is ", x.scalar_type(), x.sizes(), ", the weight [",
              shape_.outputs, ", ", shape_.inputs, "]");
  TORCH_CHECK(!bias.has_value() || (bias->dim() == 1 && bias->size(0) == shape_.outputs),
              "epikv::quantized_linear: the bias is ", bias->sizes(), ", the weight [",
              shape_.outputs, ", ", shape_.inputs, "]");
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = shape_.outputs;
  at::Tensor result = at::empty(sizes, x.options());
  if (x.numel() == 0) return result;
  const at::Tensor in = x.reshape({-1, shape_.inputs}).contiguous();
  const at::Tensor added = bias.has_value() ? bias->to(at::kFloat).contiguous() : at::Tensor();
  const float* const biases = added.defined() ? added.const_data_ptr<float>() : nullptr;
  const QuantizedRows rows = Quantize(in, shape_);
  const void* const packed = packed_.const_data_ptr();
  auto* const out = static_cast<char*>(result.mutable_data_ptr());
  const auto element = static_cast<int64_t>(result.element_size());
  const DType dtype = DTypeOf(x.scalar_type());
  const QuantizedPath path = FastestQuantizedPath();
  // Products that are worth a thread; reading a weight takes as long as multiplying it by 8 rows.
  constexpr int64_t kGrain = int64_t{1} << 22;
  const int64_t of_block = (rows.rows + 8) * shape_.inputs * kQuantizedBlock;
  at::parallel_for(
      0, QuantizedBlocks(shape_), std::max<int64_t>(1, kGrain / of_block),
      [&](int64_t first, int64_t last) {
        alignas(64) float sums[kQuantizedRows * kQuantizedBlock];
        for (int64_t block = first; block < last; ++block) {
          const int64_t output = block * kQuantizedBlock;
          const int64_t count = std::min(kQuantizedBlock, shape_.outputs - output);
          for (int64_t begin = 0; begin < rows.rows; begin += kQuantizedRows) {
            const int64_t many = std::min(kQuantizedRows, rows.rows - begin);
            MultiplyBlock(path, Some(rows, shape_, begin, many), packed, shape_, block, sums);
            for (int64_t r = 0; r < many; ++r) {
              float* const row = sums + r * kQuantizedBlock;
              for (int64_t i = 0; biases != nullptr && i < count; ++i) row[i] += biases[output + i];
              FromFloat(row, out + ((begin + r) * shape_.outputs + output) * element, count, dtype);
            }
          }
        }
      });
  return result;
}

at::Tensor PackedQuantizedWeight::Dense(at::ScalarType dtype) const {
  at::Tensor wide = at::empty({shape_.outputs, shape_.inputs}, at::kFloat);
  UnpackWeight(packed_.const_data_ptr(), shape_, wide.mutable_data_ptr<float>());
  return wide.to(dtype);
}

}  // namespace epikv

// The first's schema is that in tools/epikv/export/operators.py.
TORCH_LIBRARY_FRAGMENT(epikv, m) {
  m.class_<epikv::PackedQuantizedWeight>("PackedQuantizedWeight");
  m.def("quantized_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias=None) -> Tensor");
  m.def(
      "packed_quantized_linear(Tensor x,"
      " __torch__.torch.classes.epikv.PackedQuantizedWeight weight, Tensor? bias) -> Tensor");
  m.impl("quantized_linear", c10::DispatchKey::CompositeExplicitAutograd,
         TORCH_FN(epikv::QuantizedLinear));
  m.impl("packed_quantized_linear", c10::DispatchKey::CompositeExplicitAutograd,
         TORCH_FN(epikv::PackedQuantizedLinear));
}
