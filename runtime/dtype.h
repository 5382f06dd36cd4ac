#pragma once

#include "absl/strings/string_view.h"

namespace epikv {

// What weights, activations and the KV cache are stored in.
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

}  // namespace epikv
