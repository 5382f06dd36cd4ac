#pragma once

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
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

// Declares families, all with the same labels, and adds up the series that they can grow to.
class Declarations {
 public:
  Declarations(prometheus::Registry& registry, prometheus::Labels labels)
      : registry_(registry), labels_(std::move(labels)) {}

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
  const prometheus::Labels labels_;
  int64_t bound_ = 0;
};

// How many series the page may hold, and how many of them are promised. Thread-safe.
class SeriesBudget {
 public:
  explicit SeriesBudget(int64_t limit) : limit_(limit) {}

  bool Take(int64_t series) {  // false: there are not so many left
    absl::MutexLock lock(&mu_);
    if (series > limit_ - taken_) return false;
    taken_ += series;
    return true;
  }
  void GiveBack(int64_t series) {
    absl::MutexLock lock(&mu_);
    taken_ -= series;
  }
  int64_t taken() const {
    absl::MutexLock lock(&mu_);
    return taken_;
  }
  int64_t limit() const { return limit_; }

 private:
  const int64_t limit_;
  mutable absl::Mutex mu_;
  int64_t taken_ ABSL_GUARDED_BY(mu_) = 0;
};

// Values of the label `policy`: a policy that is used gets series of its own while the budget has
// them, else it shares those of "other". One thread at a time.
class PolicyLabels {
 public:
  // each: declares what a policy has. Both outlive this.
  PolicyLabels(SeriesBudget& budget, const Declarations& each) : budget_(budget), each_(each) {}
  ~PolicyLabels() { budget_.GiveBack(each_.bound() * static_cast<int64_t>(granted_.size())); }

  absl::string_view Of(absl::string_view policy) {
    const auto known = granted_.find(policy);
    if (known != granted_.end()) return *known;
    if (!budget_.Take(each_.bound())) return kOther;
    return *granted_.insert(std::string(policy)).first;
  }

  static constexpr absl::string_view kOther = "other";

 private:
  SeriesBudget& budget_;
  const Declarations& each_;
  std::set<std::string, std::less<>> granted_;
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
