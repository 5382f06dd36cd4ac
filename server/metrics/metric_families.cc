#include "server/metrics/metric_families.h"

#include <algorithm>
#include <cmath>

namespace epikv {

using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;

Bounds Decades(double first, double last) {
  Bounds bounds;
  for (int exponent = -6; exponent <= 6; ++exponent) {
    for (double digit : {1., 2., 5.}) {
      // Divided, not multiplied by a power below 1, so that .002 prints as .002.
      const double bound =
          exponent < 0 ? digit / std::pow(10, -exponent) : digit * std::pow(10, exponent);
      if (bound >= first * .999 && bound <= last * 1.001) bounds.push_back(bound);
    }
  }
  return bounds;
}

Bounds PowersOfTwo(int first, int last) {
  Bounds bounds;
  for (int exponent = first; exponent <= last; ++exponent) {
    bounds.push_back(static_cast<double>(int64_t{1} << exponent));
  }
  return bounds;
}

Bounds RequestBounds() {
  return {.01,   .02,   .04,   .08,   .16,    .32,    .64,    1.28,    2.56,   5.12,
          10.24, 20.48, 40.96, 81.92, 163.84, 327.68, 655.36, 1310.72, 2621.44};
}

Bounds FirstTokenBounds() {
  return {.001, .005, .01, .02, .04, .06, .08, .1,  .25, .5,  .75, 1,
          2.5,  5,    7.5, 10,  20,  40,  80,  160, 320, 640, 1280};
}

Bounds PerTokenBounds() {
  return {.001, .0025, .005, .01, .025, .05, .075, .1, .15, .2,
          .3,   .4,    .5,   .75, 1,    2.5, 5,    10, 20,  40};
}

prometheus::Labels With(prometheus::Labels labels, absl::string_view name,
                        absl::string_view value) {
  labels[std::string(name)] = std::string(value);
  return labels;
}

absl::string_view KnownOr(absl::Span<const absl::string_view> known, absl::string_view value,
                          absl::string_view other) {
  return std::find(known.begin(), known.end(), value) != known.end() ? value : other;
}

Family<Histogram>& Declarations::Histograms(const std::string& name, const std::string& help,
                                            size_t combinations, const Bounds& bounds) {
  bound_ += static_cast<int64_t>(combinations * (bounds.size() + 3));  // +Inf, sum, count
  return prometheus::BuildHistogram().Name(name).Help(help).Labels(labels_).Register(registry_);
}

Family<Counter>& Declarations::Counters(const std::string& name, const std::string& help,
                                        size_t combinations) {
  bound_ += static_cast<int64_t>(combinations);
  return prometheus::BuildCounter().Name(name).Help(help).Labels(labels_).Register(registry_);
}

Family<Gauge>& Declarations::Gauges(const std::string& name, const std::string& help,
                                    size_t combinations) {
  bound_ += static_cast<int64_t>(combinations);
  return prometheus::BuildGauge().Name(name).Help(help).Labels(labels_).Register(registry_);
}

}  // namespace epikv
