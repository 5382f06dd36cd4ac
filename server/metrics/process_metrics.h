#pragma once

#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>

#include <vector>

namespace epikv {

// The standard process_* series, read from /proc at each scrape. Thread-safe.
class ProcessMetrics final : public prometheus::Collectable {
 public:
  static constexpr int kNumSeries = 7;
  std::vector<prometheus::MetricFamily> Collect() const override;
};

}  // namespace epikv
