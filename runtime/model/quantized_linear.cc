#include "runtime/model/quantized_linear.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "runtime/base/parallel_for.h"
#include "runtime/base/scalar_type.h"
#include "runtime/kernels/kernels.h"
#include "runtime/model/blocked_linear.h"

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
  TORCH_CHECK(inputs > 0 && inputs % (8 * groups) == 0, "epikv::quantized_linear: ", inputs,
              " inputs in ", groups, " groups: not groups of a multiple of 8");
  return {
      .outputs = weight.size(0), .inputs = inputs, .group = inputs / groups, .bits = bytes ? 8 : 4};
}

// Memory that a thread keeps from one call to the next.
template <class T>
T* Scratch(std::vector<T>& memory, int64_t count) {
  if (memory.size() < static_cast<size_t>(count)) memory.resize(count);
  return memory.data();
}

// Memory of the calling thread for rounded rows, until its next call.
QuantizedRows Rows(int64_t rows, const QuantizedShape& shape) {
  thread_local std::vector<int8_t> values;
  thread_local std::vector<float> scales;
  thread_local std::vector<int32_t> sums;
  return {.rows = rows,
          .values = Scratch(values, rows * shape.inputs),
          .scales = Scratch(scales, rows * shape.groups()),
          .sums = Scratch(sums, rows * shape.groups())};
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
  WeightArena arena;
  const PackedQuantizedWeight packed(weight, scale, arena);
  return packed.Apply(x, bias.has_value() ? std::optional(bias->to(at::kFloat)) : std::nullopt);
}

}  // namespace

PackedQuantizedWeight::PackedQuantizedWeight(const at::Tensor& weight, const at::Tensor& scale,
                                             WeightArena& arena)
    : shape_(ShapeOf(weight, scale)), packed_(arena.Allocate(PackedWeightBytes(shape_))) {
  const at::Tensor integers = weight.contiguous(), scales = scale.contiguous();
  const void* const from = integers.const_data_ptr();
  const auto* const of = reinterpret_cast<const uint16_t*>(scales.const_data_ptr<at::BFloat16>());
  ParallelFor(QuantizedBlocks(shape_), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      PackWeightBlock(from, of, shape_, block, packed_.get());
    }
  });
}

at::Tensor PackedQuantizedWeight::Apply(const at::Tensor& x,
                                        const std::optional<at::Tensor>& bias) const {
  const BlockedLinear linear = {.name = "epikv::quantized_linear",
                                .inputs = shape_.inputs,
                                .outputs = shape_.outputs,
                                .block = kQuantizedBlock,
                                .rows = kQuantizedRows};
  linear.Check(x, bias);
  const QuantizedRows rows = Rows(x.numel() / shape_.inputs, shape_);
  const void* const packed = packed_.get();
  const DType dtype = DTypeOf(x.scalar_type());
  const QuantizedPath path = FastestQuantizedPath(shape_);
  return linear.Run(
      x, bias,
      [&](const void* from, int64_t row) {
        thread_local std::vector<float> memory;
        float* const wide = Scratch(memory, shape_.inputs);
        ToFloat(from, wide, shape_.inputs, dtype);
        QuantizeRow(wide, shape_, row, rows);
      },
      [&](int64_t first, int64_t count, int64_t block, float* sums) {
        MultiplyBlock(path, Some(rows, shape_, first, count), packed, shape_, block, sums);
      });
}

at::Tensor PackedQuantizedWeight::Dense(at::ScalarType dtype) const {
  at::Tensor wide = at::empty({shape_.outputs, shape_.inputs}, at::kFloat);
  UnpackWeight(packed_.get(), shape_, wide.mutable_data_ptr<float>());
  return wide.to(dtype);
}

}  // namespace epikv

// The schema is that in tools/epikv/export/operators.py.
TORCH_LIBRARY_FRAGMENT(epikv, m) {
  m.def("quantized_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias=None) -> Tensor");
  m.impl("quantized_linear", c10::DispatchKey::CompositeExplicitAutograd,
         TORCH_FN(epikv::QuantizedLinear));
}
