#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/synchronization/mutex.h"

namespace epikv {

// Which units have come lately: of the last kRemembered that were new all, of twice as many some.
// Thread-safe.
class SeenUnits {
 public:
  static constexpr size_t kRemembered = size_t{1} << 15;

  // Whether it has not come lately. unit: a hash. From now on it has.
  bool IsNew(uint64_t unit) {
    absl::MutexLock lock(&mu_);
    if (newer_.contains(unit) || older_.contains(unit)) return false;
    if (newer_.size() == kRemembered) older_ = std::exchange(newer_, {});
    newer_.insert(unit);
    return true;
  }

 private:
  absl::Mutex mu_;
  absl::flat_hash_set<uint64_t> newer_ ABSL_GUARDED_BY(mu_), older_ ABSL_GUARDED_BY(mu_);
};

}  // namespace epikv
