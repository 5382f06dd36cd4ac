#include "server/experiments/figures/earlier_outcomes.h"

#include <algorithm>

#include "absl/time/time.h"
#include "server/base/durations.h"

namespace epikv {
namespace {

bool Declares(const v1::Experiment& experiment, const EarlierOutcomes& wanted) {
  return std::any_of(experiment.metrics().begin(), experiment.metrics().end(),
                     [&](const v1::Metric& metric) { return wanted.contains(metric.name()); });
}

}  // namespace

absl::StatusOr<EarlierOutcomes> ReadEarlierOutcomes(const v1::Experiment& experiment,
                                                    absl::Span<const std::string> metrics,
                                                    Store& store,
                                                    const std::function<bool()>& cancelled) {
  EarlierOutcomes earlier;
  for (const std::string& metric : metrics) earlier[metric];
  if (earlier.empty()) return earlier;
  const absl::StatusOr<Definitions> all = store.Experiments();
  if (!all.ok()) return all.status();
  const absl::Time start = TimeOf(experiment.start_time());
  const auto take = [&](const RequestRow& row) {
    if (cancelled()) return absl::CancelledError("nobody waits for the report any more");
    if (row.forced || row.unit_is_request) return absl::OkStatus();
    for (const OutcomeRow& outcome : row.outcomes) {
      const auto means = earlier.find(outcome.metric);
      if (means == earlier.end() || outcome.received >= start) continue;
      means->second.Add(row.unit, outcome.value);
    }
    return absl::OkStatus();
  };
  for (const v1::Experiment& other : all->experiments) {
    if (other.salt() == experiment.salt() || !Declares(other, earlier)) continue;
    const absl::Status status =
        store.ReadRequests({.experiment = other.name(), .until = start}, take);
    if (!status.ok()) return status;
  }
  return earlier;
}

}  // namespace epikv
