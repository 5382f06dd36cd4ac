#pragma once

#include <cstdint>

#include "runtime/kernels/kv_format.h"

namespace epikv {

// What rows of K and V are in a tier below the pool.
enum class TierDType {
  kPool,  // as they were cached: what comes back has the very bits
  kInt8,  // KvDType::kInt8
  // Four bits a channel: of each 32 neighbours, channel x is round(x / scale), scale = max |x| / 7,
  // a float behind all channels. Off by half a scale at most.
  kInt4,
};

struct TierFormat {
  KvFormat pool;
  TierDType stored = TierDType::kPool;

  int64_t RowBytes(int64_t width) const;
  // Rows lie there as they do in the pool.
  bool same() const {
    return stored == TierDType::kPool ||
           (stored == TierDType::kInt8 && pool.stored == KvDType::kInt8);
  }
};

// A row of the pool's format, [width] channels, as it lies in a tier; and back. Where some channel
// is no finite number, so is what comes back of its scale's neighbours.
void PackRow(const void* row, void* out, int64_t width, const TierFormat& format);
void UnpackRow(const void* in, void* row, int64_t width, const TierFormat& format);

}  // namespace epikv
