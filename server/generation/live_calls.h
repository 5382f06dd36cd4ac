#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace epikv {

// How many calls have not ended. Thread-safe.
class LiveCalls {
 public:
  void Add(int calls) {
    absl::MutexLock lock(&mu_);
    count_ += calls;
  }
  void AwaitNone(absl::Time deadline) {
    absl::MutexLock lock(&mu_);
    auto none = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return count_ == 0; };
    mu_.AwaitWithDeadline(absl::Condition(&none), deadline);
  }

 private:
  absl::Mutex mu_;
  int64_t count_ ABSL_GUARDED_BY(mu_) = 0;
};

// Counts a call while it lives.
class LiveCall {
 public:
  explicit LiveCall(LiveCalls& live) : live_(live) { live_.Add(1); }
  ~LiveCall() { live_.Add(-1); }

 private:
  LiveCalls& live_;
};

}  // namespace epikv
