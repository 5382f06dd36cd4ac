#include "runtime/model/dense_linear.h"

#include <ATen/ATen.h>

#include <vector>

#include "runtime/base/parallel_for.h"
#include "runtime/base/scalar_type.h"
#include "runtime/model/blocked_linear.h"

namespace epikv {
namespace {

// Cache lines that a thread keeps from one call to the next.
struct alignas(64) Line {
  char bytes[64];
};

char* Scratch(int64_t bytes) {
  thread_local std::vector<Line> memory;
  const size_t lines = (bytes + sizeof(Line) - 1) / sizeof(Line);
  if (memory.size() < lines) memory.resize(lines);
  return memory.data()->bytes;
}

}  // namespace

PackedDenseWeight::PackedDenseWeight(const at::Tensor& weight, WeightArena& arena)
    : shape_{.outputs = weight.size(0),
             .inputs = weight.size(1),
             .dtype = DTypeOf(weight.scalar_type())},
      path_(FastestDensePath(shape_.dtype).value()),
      packed_(arena.Allocate(PackedDenseBytes(shape_))) {
  const at::Tensor rows = weight.contiguous();
  const void* const from = rows.const_data_ptr();
  ParallelFor(DenseBlocks(shape_), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      PackDenseBlock(from, shape_, block, packed_.get());
    }
  });
}

at::Tensor PackedDenseWeight::Apply(const at::Tensor& x,
                                    const std::optional<at::Tensor>& bias) const {
  const BlockedLinear linear = {.name = "epikv::packed_linear",
                                .inputs = shape_.inputs,
                                .outputs = shape_.outputs,
                                .block = kDenseBlock,
                                .rows = kDenseRows};
  linear.Check(x, bias);
  const at::ScalarType dtype = ScalarTypeOf(shape_.dtype);
  TORCH_CHECK(x.scalar_type() == dtype, linear.name, ": x is ", x.scalar_type(), ", the weight ",
              dtype);
  const int64_t row_bytes = DenseRowBytes(path_, shape_);
  char* const rows = Scratch(x.numel() / shape_.inputs * row_bytes);
  const void* const packed = packed_.get();
  return linear.Run(
      x, bias,
      [&](const void* from, int64_t row) {
        PrepareDense(path_, from, shape_, rows + row * row_bytes);
      },
      [&](int64_t first, int64_t count, int64_t block, float* sums) {
        MultiplyDense(path_, rows + first * row_bytes, count, packed, shape_, block, sums);
      });
}

at::Tensor PackedDenseWeight::Dense(at::ScalarType dtype) const {
  at::Tensor weight = at::empty({shape_.outputs, shape_.inputs}, ScalarTypeOf(shape_.dtype));
  UnpackDense(packed_.get(), shape_, weight.mutable_data_ptr());
  return weight.to(dtype);
}

}  // namespace epikv
