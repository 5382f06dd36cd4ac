#include "runtime/kernels/tier_format.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "runtime/base/elements.h"
#include "runtime/kernels/kernels.h"

namespace epikv {
namespace {

constexpr int64_t kScaled = 32;  // channels of one scale

int64_t Scales(int64_t width) { return (width + kScaled - 1) / kScaled; }
int64_t NibbleBytes(int64_t width) { return (width + 1) / 2; }

EPIKV_CLONES void PackInt4(const float* in, char* out, int64_t width) {
  char* scales = out + NibbleBytes(width);
  for (int64_t first = 0; first < width; first += kScaled, scales += sizeof(float)) {
    const int64_t count = std::min(kScaled, width - first);
    float largest = 0, finite = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float size = std::fabs(in[first + i]);
      largest = std::max(largest, size);
      finite += size * 0.0f;  // NaN, if one is not
    }
    const float scale = largest / 7 + finite;
    uint8_t nibbles[kScaled] = {};
    for (int64_t i = 0; i < count; ++i) {
      const float x = std::rint(in[first + i] / scale);
      const auto whole = static_cast<int32_t>(x >= -7 && x <= 7 ? x : 0);  // of a scale of 0 or NaN
      nibbles[i] = static_cast<uint8_t>(whole & 0xF);
    }
    for (int64_t i = 0; i < (count + 1) / 2; ++i) {
      out[first / 2 + i] = static_cast<char>(nibbles[2 * i] | (nibbles[2 * i + 1] << 4));
    }
    std::memcpy(scales, &scale, sizeof scale);
  }
}

EPIKV_CLONES void UnpackInt4(const char* in, float* out, int64_t width) {
  const char* scales = in + NibbleBytes(width);
  for (int64_t first = 0; first < width; first += kScaled, scales += sizeof(float)) {
    float scale;
    std::memcpy(&scale, scales, sizeof scale);
    for (int64_t i = 0; i < std::min(kScaled, width - first); ++i) {
      const int nibble = (in[(first + i) / 2] >> (i % 2 * 4)) & 0xF;
      out[first + i] = scale * static_cast<float>((nibble ^ 8) - 8);
    }
  }
}

// Of the model's dtype: where the row is, or a copy.
const void* Plain(const void* row, std::vector<char>& copy, int64_t width, const KvFormat& pool) {
  if (pool.stored == KvDType::kModel) return row;
  copy.resize(width * ElementBytes(pool.model));
  ReadRow(row, copy.data(), width, pool);
  return copy.data();
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
  const KvFormat& pool = format.pool;
  if (format.same()) {
    std::memcpy(out, row, pool.RowBytes(width));
  } else if (format.stored == TierDType::kInt8) {
    WriteRow(row, out, width, {.model = pool.model, .stored = KvDType::kInt8});
  } else {
    thread_local std::vector<char> copy;
    thread_local std::vector<float> floats;
    floats.resize(width);
    ToFloat(Plain(row, copy, width, pool), floats.data(), width, pool.model);
    PackInt4(floats.data(), static_cast<char*>(out), width);
  }
}

void UnpackRow(const void* in, void* row, int64_t width, const TierFormat& format) {
  const KvFormat& pool = format.pool;
  if (format.same()) {
    std::memcpy(row, in, pool.RowBytes(width));
  } else if (format.stored == TierDType::kInt8) {
    ReadRow(in, row, width, {.model = pool.model, .stored = KvDType::kInt8});
  } else {
    thread_local std::vector<char> plain;
    thread_local std::vector<float> floats;
    floats.resize(width);
    UnpackInt4(static_cast<const char*>(in), floats.data(), width);
    if (pool.stored == KvDType::kModel) return FromFloat(floats.data(), row, width, pool.model);
    plain.resize(width * ElementBytes(pool.model));
    FromFloat(floats.data(), plain.data(), width, pool.model);
    WriteRow(plain.data(), row, width, pool);
  }
}

}  // namespace epikv
