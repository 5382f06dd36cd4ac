#pragma once

#include <prometheus/metric_family.h>

#include <array>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "runtime/engine/observer.h"
#include "server/metrics/metric_families.h"

namespace epikv {

using ByPriority = std::array<int64_t, kNumPriorities>;

// How full one engine is.
struct EngineFill {
  StepStats last;  // its newest step
  int64_t peak_used_bytes = 0;
  int64_t weight_bytes = 0, scratch_bytes = 0;
  std::shared_ptr<const std::atomic<int64_t>> constraint_bytes;  // null: it has none
  int64_t max_running_requests = 0;
};

// Gauges of how full the engines are that serve one model: several while it is swapped. All values
// of an engine are from one moment, so that they add up.
class FillGauges {
 public:
  static constexpr int64_t kNumSeries = 28;

  void Add(const EngineFill& engine);
  std::vector<prometheus::MetricFamily> Families(const std::string& model) const;

 private:
  double used_ = 0, reserved_ = 0, prefixes_ = 0, capacity_ = 0, peak_used_ = 0;
  double tier_reserved_ = 0, tier_capacity_ = 0;
  double weights_ = 0, scratch_ = 0;
  double touched_ = 0, signals_ = 0, constraints_ = 0;
  ByPriority running_{}, waiting_for_kv_{}, waiting_for_place_{};
  std::optional<double> predicted_wait_;  // seconds; of the newest engine
};

// What a step's series need to know of the step before it, of the same engine.
struct StepBefore {
  absl::Time end = absl::InfinitePast();
  int64_t kv_rows_moved = 0;
};

// What each step adds to. One thread at a time.
class StepSeries {
 public:
  // of_policy: declares the series that each policy in use has.
  StepSeries(Declarations& declare, Declarations& of_policy);

  // Brings `before` up to this step.
  void Add(const StepStats& step, StepBefore& before);
  // policy: its label.
  void AddRound(absl::string_view policy, absl::Duration time);

 private:
  HistogramFamily eviction_;
  std::map<std::string, prometheus::Histogram*, std::less<>> rounds_;  // of eviction_, by policy
  prometheus::Histogram &batch_tokens_, &batch_sequences_;
  prometheus::Counter &engine_cpu_, &rows_moved_;
  prometheus::Gauge& longest_move_;
  std::array<prometheus::Histogram*, 3> by_phase_;  // prefill, decode, mixed
  std::array<prometheus::Histogram*, kNumStages> stages_;
  std::array<prometheus::Counter*, kNumStages> stage_wall_{}, stage_cpu_{};  // see Stage
  std::array<prometheus::Counter*, 2> tokens_;                               // prefill, decode
  std::array<prometheus::Counter*, 2> guesses_;                              // accepted, rejected
};

}  // namespace epikv
