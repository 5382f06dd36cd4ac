#pragma once

#include <chrono>

#include "absl/time/time.h"

namespace epikv {

// Of a clock that does not jump, since some moment.
inline absl::Duration SteadyTime() {
  return absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

}  // namespace epikv
