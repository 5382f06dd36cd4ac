#include "runtime/kernels/page_bounds.h"

#include <algorithm>
#include <cmath>

#include "runtime/base/elements.h"

namespace epikv {
namespace {

template <class T>
EPIKV_INLINE void BoundOf(const T* row, int64_t width, T* most, T* least) {
  for (int64_t i = 0; i < width; ++i) {
    const float x = Load(row + i);
    Store(most + i, std::max(x, Load(most + i)));
    Store(least + i, std::min(x, Load(least + i)));
  }
}

template <class T>
EPIKV_INLINE void BoundRowsOf(const void* rows, int64_t count, int64_t width,
                              const KvFormat& format, bool fresh, T* bounds) {
  T* const most = bounds;
  T* const least = bounds + width;
  if (fresh) {
    for (int64_t i = 0; i < width; ++i) Store(most + i, -INFINITY);
    for (int64_t i = 0; i < width; ++i) Store(least + i, INFINITY);
  }
  const char* const at = static_cast<const char*>(rows);
  const int64_t row_bytes = format.RowBytes(width);
  for (int64_t row = 0; row < count; ++row) {
    if (format.stored == KvDType::kInt8) {
      const auto* const in = reinterpret_cast<const int8_t*>(at + row * row_bytes);
      const float scale = RowScale(in, width);
      for (int64_t i = 0; i < width; ++i) {
        const float x = scale * static_cast<float>(in[i]);
        Store(most + i, std::max(x, Load(most + i)));
        Store(least + i, std::min(x, Load(least + i)));
      }
    } else {
      BoundOf(reinterpret_cast<const T*>(at + row * row_bytes), width, most, least);
    }
  }
}

// A query's product with a bound: the positive part of the one meets the most, the negative part
// the least.
template <class T>
EPIKV_INLINE void ScoresOf(const T* q, int64_t group, int64_t width, const T* bounds, int64_t pages,
                           float* scores, float* scratch) {
  float* const parts = scratch;                     // [group, 2 width]
  float* const page = scratch + 2 * group * width;  // [2 width]
  for (int64_t g = 0; g < group; ++g) {
    for (int64_t i = 0; i < width; ++i) {
      const float x = Load(q + g * width + i);
      parts[2 * g * width + i] = std::max(x, 0.0f);
      parts[(2 * g + 1) * width + i] = std::min(x, 0.0f);
    }
  }
  for (int64_t p = 0; p < pages; ++p) {
    Widen(bounds + 2 * p * width, page, 2 * width);
    float best = -INFINITY;
    for (int64_t g = 0; g < group; ++g) {
      const float* const part = parts + 2 * g * width;
      float sum = 0;
      for (int64_t i = 0; i < 2 * width; ++i) sum += part[i] * page[i];
      best = std::max(best, sum);
    }
    scores[p] = best;
  }
}

}  // namespace

EPIKV_CLONES void BoundRows(const void* rows, int64_t count, int64_t width, const KvFormat& format,
                            bool fresh, void* bounds) {
  switch (format.model) {
    case DType::kFloat32:
      return BoundRowsOf(rows, count, width, format, fresh, static_cast<float*>(bounds));
    case DType::kBFloat16:
      return BoundRowsOf(rows, count, width, format, fresh, static_cast<BFloat16*>(bounds));
    case DType::kFloat16:
      return BoundRowsOf(rows, count, width, format, fresh, static_cast<Float16*>(bounds));
  }
}

EPIKV_CLONES void PageScores(const void* q, int64_t group, int64_t width, const void* bounds,
                             int64_t pages, DType dtype, float* scores, float* scratch) {
  switch (dtype) {
    case DType::kFloat32:
      return ScoresOf(static_cast<const float*>(q), group, width, static_cast<const float*>(bounds),
                      pages, scores, scratch);
    case DType::kBFloat16:
      return ScoresOf(static_cast<const BFloat16*>(q), group, width,
                      static_cast<const BFloat16*>(bounds), pages, scores, scratch);
    case DType::kFloat16:
      return ScoresOf(static_cast<const Float16*>(q), group, width,
                      static_cast<const Float16*>(bounds), pages, scores, scratch);
  }
}

}  // namespace epikv
