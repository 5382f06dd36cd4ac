#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace epikv {

// Waits for what a mutex guards, however the clock jumps meanwhile: timeouts of absl::Mutex are
// moments of the wall clock (Abseil 20220623), so that one that goes back an hour adds an hour.
class SteadyCondVar {
 public:
  // By who has changed what is waited for.
  void Signal() { changed_.notify_all(); }

  // Until `done` holds, at most so long; whether it does. mu: held, but while it waits.
  bool Wait(absl::Mutex& mu, absl::Duration most, absl::FunctionRef<bool()> done)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    constexpr absl::Duration kForEver = absl::Hours(24 * 365);
    Held held{mu};
    return changed_.wait_for(held, absl::ToChronoNanoseconds(std::min(most, kForEver)), done);
  }

 private:
  struct Held {
    void lock() ABSL_NO_THREAD_SAFETY_ANALYSIS { mu.Lock(); }
    void unlock() ABSL_NO_THREAD_SAFETY_ANALYSIS { mu.Unlock(); }
    absl::Mutex& mu;
  };
  std::condition_variable_any changed_;
};

}  // namespace epikv
