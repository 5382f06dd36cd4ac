#pragma once

#include <cmath>

#include "absl/time/time.h"

namespace epikv {

// What is so old weighs 1/e of what is new.
inline constexpr absl::Duration kRecent = absl::Seconds(10);

// How much a second of late. One thread at a time.
class RecentRate {
 public:
  void Add(double amount, absl::Time now) {
    per_second_ = At(now) + amount / absl::ToDoubleSeconds(kRecent);
    if (now > at_) at_ = now;
  }
  double At(absl::Time now) const {
    if (now <= at_) return per_second_;  // the clock was set back
    return per_second_ * std::exp(-absl::FDivDuration(now - at_, kRecent));
  }

 private:
  double per_second_ = 0;
  absl::Time at_ = absl::InfinitePast();
};

// The mean of late of a value that changes at moments; 0 before the first. One thread at a time.
class RecentMean {
 public:
  void Set(double value, absl::Time now) {
    mean_ = At(now);
    value_ = value;
    if (now > at_) at_ = now;
  }
  double At(absl::Time now) const {
    if (now <= at_) return mean_;
    return value_ + (mean_ - value_) * std::exp(-absl::FDivDuration(now - at_, kRecent));
  }

 private:
  double mean_ = 0, value_ = 0;
  absl::Time at_ = absl::InfinitePast();
};

}  // namespace epikv
