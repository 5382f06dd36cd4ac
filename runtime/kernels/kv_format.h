#pragma once

#include <cstdint>
#include <cstring>
#include <optional>

#include "absl/strings/string_view.h"
#include "runtime/base/dtype.h"

namespace epikv {

// What cached K and V are made of.
enum class KvDType {
  kModel,  // the model's dtype
  kInt8,   // int8, and behind a row's elements its scale, a float: an element is worth scale * int8
};

// Of the setting's name, "model" or "int8".
std::optional<KvDType> KvDTypeOf(absl::string_view name);

// How a row of K or V, of one token, layer and KV head, lies in memory. Rows follow one another
// without gaps, so that whoever moves or copies them need not know what they are.
struct KvFormat {
  DType model = DType::kFloat32;  // what rows are made from, and read as
  KvDType stored = KvDType::kModel;

  int64_t RowBytes(int64_t width) const {
    return stored == KvDType::kInt8 ? width + static_cast<int64_t>(sizeof(float))
                                    : width * ElementBytes(model);
  }
  absl::string_view name() const { return stored == KvDType::kInt8 ? "int8" : DTypeName(model); }
};

// Makes a row of [width] elements of the model's dtype. As int8, x becomes the integer next to
// x / scale, where scale = max |x| / 127: off by half a scale at most. Where some x is no finite
// number, the scale is NaN, and so is what is made of the row. `in` and `out` do not overlap.
void WriteRow(const void* in, void* out, int64_t width, const KvFormat& format);
// Reads one back, [width] elements of the model's dtype.
void ReadRow(const void* in, void* out, int64_t width, const KvFormat& format);

// Of a row of int8.
inline float RowScale(const void* row, int64_t width) {
  float scale;
  std::memcpy(&scale, static_cast<const char*>(row) + width, sizeof scale);
  return scale;
}

}  // namespace epikv
