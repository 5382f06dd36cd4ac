#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "epikv/v1/experiment.pb.h"
#include "server/experiments/store/store.h"

namespace epikv {

struct ReportOptions {
  int points = 50;               // of each series over time, from 1 to 200
  bool guardrails_only = false;  // of metrics, those that a guardrail names
  // Of units' sums at once; more metrics than fit are read in several passes over the store.
  int64_t memory_bytes = int64_t{256} << 20;
  // A request without an end counts as failed from then on: its server ended before it.
  // By whichever is earlier of `now` and a clock that does not jump: a wall clock that was set must
  // not end what still runs.
  absl::Duration lost_after = absl::Hours(1);
  // Asked now and then; true: nobody waits for the report any more.
  std::function<bool()> cancelled = [] { return false; };
};

// What the store holds of an experiment and what follows from it, as of `now`. Blocks, for as long
// as its records take to read. Errors: those of Store::ReadRequests; kCancelled.
absl::StatusOr<v1::ExperimentReport> MakeReport(const v1::Experiment& experiment, Store& store,
                                                const ReportOptions& options, absl::Time now);

}  // namespace epikv
