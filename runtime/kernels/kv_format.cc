#include "runtime/kernels/kv_format.h"

#include <algorithm>
#include <cmath>

#include "runtime/base/elements.h"

namespace epikv {
namespace {

template <class T>
EPIKV_INLINE void QuantizeOf(const T* in, int8_t* out, int64_t width) {
  float largest = 0, finite = 0;
  for (int64_t i = 0; i < width; ++i) {
    const float size = std::fabs(Load(in + i));
    largest = std::max(largest, size);
    finite += size * 0.0f;  // NaN, if one is not
  }
  const float scale = largest / 127 + finite;
  for (int64_t i = 0; i < width; ++i) {
    const float x = std::rint(Load(in + i) / scale);
    out[i] = static_cast<int8_t>(x >= -127 && x <= 127 ? x : 0);  // 0: of a scale of 0 or NaN
  }
  std::memcpy(out + width, &scale, sizeof scale);
}

template <class T>
EPIKV_INLINE void DequantizeOf(const int8_t* in, T* out, int64_t width) {
  const float scale = RowScale(in, width);
  for (int64_t i = 0; i < width; ++i) Store(out + i, scale * static_cast<float>(in[i]));
}

EPIKV_CLONES void Quantize(const void* in, int8_t* out, int64_t width, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return QuantizeOf(static_cast<const float*>(in), out, width);
    case DType::kBFloat16:
      return QuantizeOf(static_cast<const BFloat16*>(in), out, width);
    case DType::kFloat16:
      return QuantizeOf(static_cast<const Float16*>(in), out, width);
  }
}

EPIKV_CLONES void Dequantize(const int8_t* in, void* out, int64_t width, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return DequantizeOf(in, static_cast<float*>(out), width);
    case DType::kBFloat16:
      return DequantizeOf(in, static_cast<BFloat16*>(out), width);
    case DType::kFloat16:
      return DequantizeOf(in, static_cast<Float16*>(out), width);
  }
}

}  // namespace

std::optional<KvDType> KvDTypeOf(absl::string_view name) {
  if (name == "model") return KvDType::kModel;
  if (name == "int8") return KvDType::kInt8;
  return std::nullopt;
}

void WriteRow(const void* in, void* out, int64_t width, const KvFormat& format) {
  if (format.stored == KvDType::kInt8) {
    return Quantize(in, static_cast<int8_t*>(out), width, format.model);
  }
  std::memcpy(out, in, format.RowBytes(width));
}

void ReadRow(const void* in, void* out, int64_t width, const KvFormat& format) {
  if (format.stored == KvDType::kInt8) {
    return Dequantize(static_cast<const int8_t*>(in), out, width, format.model);
  }
  std::memcpy(out, in, format.RowBytes(width));
}

}  // namespace epikv
