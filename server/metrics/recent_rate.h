#pragma once

#include <cmath>

#include "absl/time/time.h"

namespace epikv {

// How much a second of late: what is `kWindow` old weighs 1/e of what is new. One thread at a time.
class RecentRate {
 public:
  static constexpr absl::Duration kWindow = absl::Seconds(10);

  void Add(double amount, absl::Time now) {
    per_second_ = At(now) + amount / absl::ToDoubleSeconds(kWindow);
    if (now > at_) at_ = now;
  }
  double At(absl::Time now) const {
    if (now <= at_) return per_second_;  // the clock was set back
    return per_second_ * std::exp(-absl::FDivDuration(now - at_, kWindow));
  }

 private:
  double per_second_ = 0;
  absl::Time at_ = absl::InfinitePast();
};

}  // namespace epikv
