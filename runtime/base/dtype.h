#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"

namespace epikv {

// What weights and activations are stored in; and the KV cache, unless it is told otherwise
// (KvDType).
enum class DType { kFloat32, kBFloat16, kFloat16 };

inline absl::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
  }
  return "";
}

inline int64_t ElementBytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace epikv
