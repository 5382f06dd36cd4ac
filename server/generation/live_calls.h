#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "runtime/base/steady_cond_var.h"
#include "runtime/base/steady_time.h"

namespace epikv {

// How many calls have not ended. Thread-safe.
class LiveCalls {
 public:
  void Add(int calls) {
    absl::MutexLock lock(&mu_);
    count_ += calls;
    if (count_ == 0) none_.Signal();
  }
  void AwaitNone(absl::Time deadline) {  // of SteadyNow
    absl::MutexLock lock(&mu_);
    auto none = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return count_ == 0; };
    none_.Wait(mu_, deadline - SteadyNow(), none);
  }

 private:
  absl::Mutex mu_;
  SteadyCondVar none_;
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
