#pragma once

#include <c10/core/ScalarType.h>

#include "runtime/base/dtype.h"

namespace epikv {

// LibTorch's name for a dtype, and back.
inline at::ScalarType ScalarTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return at::kFloat;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat16:
      return at::kHalf;
  }
  return at::kFloat;
}

// Precondition: one of the three.
inline DType DTypeOf(at::ScalarType type) {
  return type == at::kBFloat16 ? DType::kBFloat16
         : type == at::kHalf   ? DType::kFloat16
                               : DType::kFloat32;
}

}  // namespace epikv
