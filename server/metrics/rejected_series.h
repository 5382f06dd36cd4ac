#pragma once

#include "absl/strings/string_view.h"
#include "server/metrics/metric_families.h"

namespace epikv {

// Requests that were refused before they were queued, by why. Thread-safe.
class RejectedSeries {
 public:
  explicit RejectedSeries(Declarations& declare);

  void Count(absl::string_view reason);  // ErrorInfo.reason

 private:
  prometheus::Family<prometheus::Counter>& family_;
};

}  // namespace epikv
