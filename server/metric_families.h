#pragma once

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace epikv {

using Bounds = std::vector<double>;

// 1, 2 and 5 times powers of ten, from `first` to `last`, both of that kind.
Bounds Decades(double first, double last);
// 2^first to 2^last.
Bounds PowersOfTwo(int first, int last);
// Seconds of a whole request, of its first token and of one token: OpenTelemetry's, widened for
// CPUs.
Bounds RequestBounds();
Bounds FirstTokenBounds();
Bounds PerTokenBounds();

inline double Seconds(absl::Duration duration) { return absl::ToDoubleSeconds(duration); }

prometheus::Labels With(prometheus::Labels labels, absl::string_view name, absl::string_view value);

// `value` if it is known, else `other`: labels take their values from closed sets.
absl::string_view KnownOr(absl::Span<const absl::string_view> known, absl::string_view value,
                          absl::string_view other);

// Declares families, all with the label `model`, and adds up the series that they can grow to.
class Declarations {
 public:
  Declarations(prometheus::Registry& registry, std::string model)
      : registry_(registry), model_(std::move(model)) {}

  // combinations: of label values.
  prometheus::Family<prometheus::Histogram>& Histograms(const std::string& name,
                                                        const std::string& help,
                                                        size_t combinations, const Bounds& bounds);
  prometheus::Family<prometheus::Counter>& Counters(const std::string& name,
                                                    const std::string& help, size_t combinations);
  prometheus::Family<prometheus::Gauge>& Gauges(const std::string& name, const std::string& help,
                                                size_t combinations);
  // Series that are not in the registry.
  void Count(int64_t series) { bound_ += series; }

  int64_t bound() const { return bound_; }

 private:
  prometheus::Registry& registry_;
  const std::string model_;
  int64_t bound_ = 0;
};

// Histograms of one name and the same bounds.
class HistogramFamily {
 public:
  HistogramFamily(Declarations& declare, const std::string& name, const std::string& help,
                  size_t combinations, Bounds bounds)
      : bounds_(std::move(bounds)),
        family_(declare.Histograms(name, help, combinations, bounds_)) {}

  prometheus::Histogram& Of(const prometheus::Labels& labels) {
    return family_.Add(labels, bounds_);
  }
  const Bounds& bounds() const { return bounds_; }

 private:
  const Bounds bounds_;
  prometheus::Family<prometheus::Histogram>& family_;
};

}  // namespace epikv
