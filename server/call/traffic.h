#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace epikv {

// How many calls to our services have come and ended. While a server stops, each of these says that
// there are clients, and perhaps a balancer that has not seen yet that they belong elsewhere.
// Thread-safe.
class Traffic {
 public:
  void OnCall() { ++events_; }
  void OnEnd() { ++events_; }
  int64_t events() const { return events_; }

  // Until nothing has come or ended for a second, at most so long; at once if nothing has since
  // there were `known` events. A port that closes cuts what comes with CANCELLED, which nobody
  // would try again.
  void AwaitQuiet(int64_t known, absl::Duration most) const {
    constexpr absl::Duration kQuiet = absl::Seconds(1);
    for (int64_t now; (now = events_) != known && most > absl::ZeroDuration(); most -= kQuiet) {
      known = now;
      absl::SleepFor(std::min(kQuiet, most));
    }
  }

 private:
  std::atomic<int64_t> events_ = 0;
};

}  // namespace epikv
