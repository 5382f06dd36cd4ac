#pragma once

#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>

#include <array>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "runtime/observer.h"
#include "server/metric_families.h"

namespace epikv {

// How full the engine is: gauges that are all from one moment, so that they add up. Thread-safe.
class EngineGauges final : public prometheus::Collectable {
 public:
  static constexpr int64_t kNumSeries = 18;

  EngineGauges(std::string model, int64_t kv_capacity_bytes, int64_t max_running_requests);

  void Set(const StepStats& step);
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const std::string model_;
  const int64_t max_running_requests_;
  mutable absl::Mutex mu_;
  StepStats last_ ABSL_GUARDED_BY(mu_);
  int64_t peak_used_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

// What each step adds to. Of the engine's thread.
class StepSeries {
 public:
  StepSeries(Declarations& declare, size_t num_policies);

  // evicting: policies of the requests that had a round in this step.
  void Add(const StepStats& step, const std::set<absl::string_view>& evicting);

 private:
  void AddGaps(const StepStats& step);

  HistogramFamily gap_family_, eviction_;
  prometheus::Histogram &gaps_, &batch_tokens_, &batch_sequences_;
  prometheus::Counter &engine_cpu_, &rows_moved_;
  prometheus::Gauge& longest_move_;
  std::array<prometheus::Histogram*, 3> by_phase_;  // prefill, decode, mixed
  std::array<prometheus::Histogram*, kNumStages> stages_;
  std::array<prometheus::Counter*, kNumStages> stage_wall_, stage_cpu_;
  std::array<prometheus::Counter*, 2> tokens_;  // prefill, decode

  absl::Time last_end_ = absl::InfinitePast();
  bool left_running_ = false;  // requests, after the last step
};

}  // namespace epikv
