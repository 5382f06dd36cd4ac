#pragma once

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/metric_family.h>
#include <prometheus/registry.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "epikv/v1/experiment.pb.h"
#include "epikv/v1/experiment_record.pb.h"
#include "server/experiments/figures/shadow_observer.h"
#include "server/experiments/store/recorder.h"
#include "server/metrics/metric_families.h"

namespace epikv {

// What Prometheus may scrape of experiments: who takes part, and how its records fare. Thread-safe.
class ExperimentSeries final : public RecorderObserver, public ShadowObserver {
 public:
  // budget, which outlives this, has given what `own_series` says.
  explicit ExperimentSeries(SeriesBudget& budget);
  ~ExperimentSeries() override;

  int64_t own_series() const { return declare_.bound(); }

  // Those that have series from now on; what others had is dropped. One that the budget has no room
  // for has none.
  void Keep(absl::Span<const v1::Experiment> experiments);

  void OnAssigned(const v1::RequestBegan& began);
  void OnExcluded(const std::string& experiment);
  void OnSampleRatio(const std::string& experiment, double p_value);
  void OnBreached(const std::string& experiment, const v1::GuardrailReport& guardrail);
  void OnShadow(const v1::RequestBegan& began, ShadowFate fate, const Divergence& found) override;
  void OnPair(const v1::RequestBegan& began, ShadowFate fate, const PairFound& found) override;
  void OnShadowWaiting(int64_t requests) override { shadow_waiting_.Set(AsDouble(requests)); }
  void OnShadowTime(absl::Duration spent, bool interrupted) override;

  void OnWritten(int64_t records) override { written_.Increment(AsDouble(records)); }
  void OnReplayed(int64_t records) override { replayed_.Increment(AsDouble(records)); }
  void OnSpooled(int64_t records) override { spooled_.Increment(AsDouble(records)); }
  void OnDropped(int64_t records) override { dropped_.Increment(AsDouble(records)); }
  void OnRefused(int64_t outcomes) override { refused_.Increment(AsDouble(outcomes)); }
  void OnOrphaned(Recorded why) override;
  void OnOutcome(const CountedOutcome& outcome) override;
  void OnOutageTime(absl::Duration more) override;
  void OnSpool(int64_t bytes, SpoolDamage damage) override;

  std::vector<prometheus::MetricFamily> Collect() const;

 private:
  class OfExperiment;
  static double AsDouble(int64_t value) { return static_cast<double>(value); }

  SeriesBudget& budget_;
  prometheus::Registry registry_;
  Declarations declare_;
  prometheus::Family<prometheus::Counter>& records_;
  prometheus::Counter &written_, &replayed_, &spooled_, &dropped_, &refused_;
  prometheus::Family<prometheus::Counter>& orphaned_;
  prometheus::Counter& outage_seconds_;
  prometheus::Gauge& spool_bytes_;
  prometheus::Counter& spool_damaged_bytes_;
  prometheus::Gauge& running_;
  prometheus::Counter &shadow_seconds_, &shadow_interruptions_;
  prometheus::Gauge& shadow_waiting_;
  mutable absl::Mutex mu_;
  std::map<std::string, std::unique_ptr<OfExperiment>, std::less<>> experiments_
      ABSL_GUARDED_BY(mu_);
};

}  // namespace epikv
