#pragma once

#include <chrono>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace epikv {

// Of a clock that does not jump, since some moment.
inline absl::Duration SteadyTime() {
  return absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

// The time by that clock: what the wall clock said when this was first asked, and what has passed
// since. For all that is compared with a later moment of this process: deadlines, ages, waits. What
// people or other machines are told is absl::Now().
inline absl::Time SteadyNow() {
  static const absl::Time start = absl::Now() - SteadyTime();
  return start + SteadyTime();
}

}  // namespace epikv
