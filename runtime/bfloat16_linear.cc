#include "runtime/bfloat16_linear.h"

#include <ATen/ATen.h>

#include <vector>

#include "runtime/blocked_linear.h"

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

PackedBFloat16Weight::PackedBFloat16Weight(const at::Tensor& weight, WeightArena& arena)
    : path_(FastestBFloat16Path().value()),
      shape_{.outputs = weight.size(0), .inputs = weight.size(1)},
      packed_(arena.Allocate(PackedBFloat16Bytes(shape_))) {
  const at::Tensor rows = weight.contiguous();
  PackBFloat16(reinterpret_cast<const uint16_t*>(rows.const_data_ptr<at::BFloat16>()), shape_,
               packed_.get());
}

at::Tensor PackedBFloat16Weight::Apply(const at::Tensor& x,
                                       const std::optional<at::Tensor>& bias) const {
  const BlockedLinear linear = {.name = "epikv::packed_linear",
                                .inputs = shape_.inputs,
                                .outputs = shape_.outputs,
                                .block = kBFloat16Block,
                                .rows = kBFloat16Rows};
  linear.Check(x, bias);
  TORCH_CHECK(x.scalar_type() == at::kBFloat16, linear.name, ": x is ", x.scalar_type(),
              ", the weight bfloat16");
  const int64_t row_bytes = BFloat16RowBytes(path_, shape_);
  char* const rows = Scratch(x.numel() / shape_.inputs * row_bytes);
  const void* const packed = packed_.get();
  return linear.Run(
      x, bias,
      [&](const void* from, int64_t row) {
        PrepareBFloat16(path_, static_cast<const uint16_t*>(from), shape_, rows + row * row_bytes);
      },
      [&](int64_t first, int64_t count, int64_t block, float* sums) {
        MultiplyBFloat16(path_, rows + first * row_bytes, count, packed, shape_, block, sums);
      });
}

at::Tensor PackedBFloat16Weight::Dense(at::ScalarType dtype) const {
  at::Tensor weight = at::empty({shape_.outputs, shape_.inputs}, at::kBFloat16);
  UnpackBFloat16(packed_.get(), shape_,
                 reinterpret_cast<uint16_t*>(weight.mutable_data_ptr<at::BFloat16>()));
  return weight.to(dtype);
}

}  // namespace epikv
