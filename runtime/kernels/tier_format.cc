#include "runtime/kernels/tier_format.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "runtime/kernels/kernels.h"

namespace epikv {
namespace {

constexpr int64_t kScaled = 32;  // channels of one scale

int64_t Scales(int64_t width) { return (width + kScaled - 1) / kScaled; }
int64_t NibbleBytes(int64_t width) { return (width + 1) / 2; }

// In fp32, through the model's dtype.
void ToFloats(const void* row, float* out, int64_t width, const KvFormat& format) {
  thread_local std::vector<char> plain;
  plain.resize(width * ElementBytes(format.model));
  ReadRow(row, plain.data(), width, format);
  ToFloat(plain.data(), out, width, format.model);
}

void FromFloats(const float* in, void* row, int64_t width, const KvFormat& format) {
  thread_local std::vector<char> plain;
  plain.resize(width * ElementBytes(format.model));
  FromFloat(in, plain.data(), width, format.model);
  WriteRow(plain.data(), row, width, format);
}

void PackInt4(const float* in, char* out, int64_t width) {
  std::fill_n(out, NibbleBytes(width), 0);
  for (int64_t first = 0; first < width; first += kScaled) {
    const int64_t end = std::min(width, first + kScaled);
    float most = 0;
    for (int64_t c = first; c < end; ++c) {
      // A NaN stays: whatever is compared with it is false.
      most = std::isnan(in[c]) || std::abs(in[c]) > most ? std::abs(in[c]) : most;
    }
    const float scale = std::isfinite(most) ? most / 7 : std::nanf("");
    for (int64_t c = first; c < end; ++c) {
      const float value = scale > 0 ? std::nearbyint(in[c] / scale) : 0;
      const auto nibble = static_cast<int>(std::clamp(value, -7.f, 7.f)) & 0xF;
      out[c / 2] = static_cast<char>(out[c / 2] | (c % 2 == 0 ? nibble : nibble << 4));
    }
    std::memcpy(out + NibbleBytes(width) + first / kScaled * sizeof(float), &scale, sizeof scale);
  }
}

void UnpackInt4(const char* in, float* out, int64_t width) {
  for (int64_t c = 0; c < width; ++c) {
    float scale;
    std::memcpy(&scale, in + NibbleBytes(width) + c / kScaled * sizeof(float), sizeof scale);
    const int nibble = (in[c / 2] >> (c % 2 == 0 ? 0 : 4)) & 0xF;
    out[c] = scale * static_cast<float>(nibble >= 8 ? nibble - 16 : nibble);
  }
}

}  // namespace

int64_t TierFormat::RowBytes(int64_t width) const {
  switch (stored) {
    case TierDType::kPool:
      return pool.RowBytes(width);
    case TierDType::kInt8:
      return KvFormat{.model = pool.model, .stored = KvDType::kInt8}.RowBytes(width);
    case TierDType::kInt4:
      break;
  }
  return NibbleBytes(width) + Scales(width) * static_cast<int64_t>(sizeof(float));
}

void PackRow(const void* row, void* out, int64_t width, const TierFormat& format) {
  const KvFormat int8{.model = format.pool.model, .stored = KvDType::kInt8};
  if (format.same()) {
    std::memcpy(out, row, format.pool.RowBytes(width));
    return;
  }
  thread_local std::vector<float> floats;
  floats.resize(width);
  ToFloats(row, floats.data(), width, format.pool);
  if (format.stored == TierDType::kInt8) {
    FromFloats(floats.data(), out, width, int8);
  } else {
    PackInt4(floats.data(), static_cast<char*>(out), width);
  }
}

void UnpackRow(const void* in, void* row, int64_t width, const TierFormat& format) {
  const KvFormat int8{.model = format.pool.model, .stored = KvDType::kInt8};
  if (format.same()) {
    std::memcpy(row, in, format.pool.RowBytes(width));
    return;
  }
  thread_local std::vector<float> floats;
  floats.resize(width);
  if (format.stored == TierDType::kInt8) {
    ToFloats(in, floats.data(), width, int8);
  } else {
    UnpackInt4(static_cast<const char*>(in), floats.data(), width);
  }
  FromFloats(floats.data(), row, width, format.pool);
}

}  // namespace epikv
