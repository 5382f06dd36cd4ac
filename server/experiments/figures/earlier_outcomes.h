#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "epikv/v1/experiment.pb.h"
#include "server/experiments/store/store.h"

namespace epikv {

// The mean of a unit's outcomes of one metric.
class EarlierMeans {
 public:
  void Add(uint64_t unit, double value) {
    Sum& sum = sums_[unit];
    sum.values += value;
    sum.count += 1;
  }
  std::optional<double> Of(uint64_t unit) const {
    const auto found = sums_.find(unit);
    if (found == sums_.end()) return std::nullopt;
    return found->second.values / found->second.count;
  }

 private:
  struct Sum {
    double values = 0, count = 0;
  };
  absl::flat_hash_map<uint64_t, Sum> sums_;
};

// What units showed before an experiment started, of these metrics: the outcomes that were received
// by then. They are of other experiments in the store, whose salt is another: with the same salt
// the arms of then would be those of now. Requests that were forced, or that named no unit, are
// left out. Blocks. cancelled: see ReportOptions. Errors: those of Store::ReadRequests; kCancelled.
using EarlierOutcomes = std::map<std::string, EarlierMeans, std::less<>>;
absl::StatusOr<EarlierOutcomes> ReadEarlierOutcomes(const v1::Experiment& experiment,
                                                    absl::Span<const std::string> metrics,
                                                    Store& store,
                                                    const std::function<bool()>& cancelled);

}  // namespace epikv
