#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

namespace epikv {

// The last `window` of a stream of numbers, in no order. Statistics are summed anew at every step,
// in double: no drift, and a number that is not finite is forgotten after `window` more.
class RollingWindow {
 public:
  explicit RollingWindow(int64_t window) : window_(window) {}

  const std::vector<float>& Push(float x) {
    if (values_.size() < window_) {
      values_.push_back(x);
    } else {
      values_[oldest_] = x;
      oldest_ = (oldest_ + 1) % window_;
    }
    return values_;
  }

 private:
  size_t window_;
  size_t oldest_ = 0;          // once the window is full
  std::vector<float> values_;  // a ring
};

// Mean of the last `window` numbers.
class RollingMean {
 public:
  explicit RollingMean(int64_t window) : last_(window) {}

  double Push(float x) {
    const std::vector<float>& values = last_.Push(x);
    return std::accumulate(values.begin(), values.end(), 0.0) / values.size();
  }

 private:
  RollingWindow last_;
};

// z-score of the newest number among the last `window` ones, itself included: (x - mean) /
// (population standard deviation + 1e-6); 0 for the first.
class RollingZ {
 public:
  explicit RollingZ(int64_t window) : last_(window) {}

  double Push(float x) {
    const std::vector<float>& values = last_.Push(x);
    if (values.size() < 2) return 0;
    // Relative to x, so that equal numbers give exactly 0 and tie.
    double sum = 0;
    for (float value : values) sum += value - double{x};
    const double mean = sum / values.size();
    double squares = 0;
    for (float value : values) squares += Square(value - double{x} - mean);
    return -mean / (std::sqrt(squares / values.size()) + 1e-6);
  }

 private:
  static double Square(double x) { return x * x; }

  RollingWindow last_;
};

// EpiKV-Flat's score of each decode token in turn.
class FlatScore {
 public:
  // sign: 1 or -1
  FlatScore(int64_t window, int64_t sign) : sign_(sign), z_a_(window), z_b_(window) {}

  float Push(float step_a, float step_b) { return sign_ * (z_a_.Push(step_a) - z_b_.Push(step_b)); }

 private:
  double sign_;
  RollingZ z_a_, z_b_;
};

}  // namespace epikv
