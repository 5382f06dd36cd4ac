#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "epikv/v1/experiment.pb.h"
#include "server/base/durations.h"
#include "server/experiments/figures/arms.h"
#include "server/experiments/figures/comparison.h"
#include "server/experiments/figures/distribution.h"
#include "server/experiments/figures/figure_messages.h"
#include "server/experiments/figures/measures.h"
#include "server/experiments/figures/metric_tally.h"
#include "server/experiments/figures/throughput.h"
#include "server/experiments/store/store.h"

namespace epikv {

// One metric over one population: everyone who takes part, or the exposed.
class Population {
 public:
  Population(const Arms& arms, const Measure& measure, double alpha)
      : arms_(arms),
        measure_(measure),
        options_{.kind = KindOf(measure.metric), .alpha = alpha},
        tally_(arms.size()),
        requests_(arms.size()),
        covered_(arms.size()),
        points_(arms.size()) {
    if (measure.metric.tau() > 0) options_.tau = measure.metric.tau();
  }

  // Of one request, or of one window.
  void Add(const Owner& owner, const Observations& values, std::optional<double> covariate) {
    ++requests_[owner.arm];
    covered_[owner.arm] += values.empty() ? 0 : 1;
    for (double value : values) tally_.Add(owner.arm, owner.unit, value, covariate);
  }
  // Of what came until now.
  void AddPoint(absl::Time time) {
    for (size_t arm = 0; arm < arms_.size(); ++arm) {
      if (arm == arms_.control()) continue;
      const Comparison comparison = Compared(arm);
      v1::EffectPoint& point = points_[arm].emplace_back();
      *point.mutable_time() = TimestampProto(time);
      if (comparison.difference.has_value()) point.set_difference(*comparison.difference);
      *point.mutable_interval() = ToProto(comparison.interval);
    }
  }
  Comparison Compared(size_t arm) const { return Compared(arm, options_.alpha); }
  Comparison Compared(size_t arm, double alpha) const {
    AnalysisOptions options = options_;
    options.alpha = alpha;
    return Compare(tally_.sums(), arms_.control(), arm, options);
  }
  bool CovariateDiffers() const { return epikv::CovariateDiffers(tally_.sums()); }
  v1::Analysis Analyse(bool blocked) const {
    v1::Analysis analysis;
    for (size_t arm = 0; arm < arms_.size(); ++arm) {
      *analysis.add_arms() = Value(arm);
      if (blocked || arm == arms_.control()) continue;
      v1::Effect& effect = *analysis.add_effects();
      effect = EffectOf(arms_.at(arm).name(), Compared(arm), measure_.metric);
      effect.mutable_points()->Add(points_[arm].begin(), points_[arm].end());
    }
    return analysis;
  }
  double Coverage(size_t arm) const {
    return requests_[arm] == 0
               ? 0
               : static_cast<double>(covered_[arm]) / static_cast<double>(requests_[arm]);
  }

 private:
  v1::ArmValue Value(size_t arm) const {
    const ArmReading reading = ReadArm(tally_.sums(), arm, options_);
    v1::ArmValue value;
    value.set_arm(arms_.at(arm).name());
    value.set_units(static_cast<uint64_t>(reading.observed.units));
    value.set_observations(static_cast<uint64_t>(reading.observed.observations));
    value.set_coverage(Coverage(arm));
    if (reading.observed.mean.has_value()) value.set_mean(*reading.observed.mean);
    *value.mutable_interval() = ToProto(reading.interval);
    value.set_basis(ToProto(reading.basis));
    value.set_covariate_units(static_cast<uint64_t>(reading.observed.covariate_units));
    return value;
  }

  const Arms& arms_;
  const Measure& measure_;
  AnalysisOptions options_;
  MetricTally tally_;
  std::vector<int64_t> requests_, covered_;  // by arm
  std::vector<std::vector<v1::EffectPoint>> points_;
};

// One metric of the report.
class MetricPart {
 public:
  // earlier: see CovariateOf; it outlives this.
  MetricPart(const Arms& arms, const Measure& measure, double alpha, const EarlierMeans* earlier)
      : measure_(measure),
        alpha_(alpha),
        earlier_(earlier),
        all_(arms, measure, alpha),
        exposed_(arms, measure, alpha),
        coverage_(arms.size()),
        bins_(arms.size()) {}

  void Add(const Owner& owner, const RequestRow& row) {
    if (measure_.of_windows) return;
    const Observations values = ObservationsOf(measure_, row);
    Add(owner, row.exposed, values, CovariateOf(measure_.metric, owner, earlier_));
    if (!measure_.measured && (row.lost || row.end.has_value())) {
      coverage_.Add(owner.arm, owner.unit, values.empty() ? 0 : 1);
    }
  }
  void Add(const Owner& owner, const WindowOutput& window) {
    if (measure_.of_windows) Add(owner, window.exposed, {window.tokens_per_second}, std::nullopt);
  }
  void AddPoint(absl::Time time) {
    all_.AddPoint(time);
    exposed_.AddPoint(time);
  }

  bool has_distribution() const {
    return measure_.measured && KindOf(measure_.metric) == MetricKind::kMean;
  }
  const std::vector<ValueBins>& bins() const { return bins_; }
  const Population& all() const { return all_; }
  const Measure& measure() const { return measure_; }
  // Whether the arms certainly differ in how many of their requests that are over have an outcome.
  bool CoverageDiffers(size_t control, size_t arm) const {
    if (measure_.measured) return false;
    const Comparison comparison =
        Compare(coverage_.sums(), control, arm, {.kind = MetricKind::kProportion, .alpha = alpha_});
    return comparison.p_value < alpha_;
  }

  v1::MetricReport Report(bool blocked) const {
    v1::MetricReport report;
    *report.mutable_metric() = measure_.metric;
    report.set_primary(measure_.primary);
    report.set_measured(measure_.measured);
    report.set_confounded(measure_.confounded);
    report.set_alpha(alpha_);
    *report.mutable_all() = all_.Analyse(blocked);
    *report.mutable_exposed() = exposed_.Analyse(blocked);
    return report;
  }

 private:
  void Add(const Owner& owner, bool exposed, const Observations& values,
           std::optional<double> covariate) {
    all_.Add(owner, values, covariate);
    if (exposed) exposed_.Add(owner, values, covariate);
    if (!has_distribution()) return;
    for (double value : values) bins_[owner.arm].Add(value);
  }

  const Measure& measure_;
  const double alpha_;
  const EarlierMeans* const earlier_;
  Population all_, exposed_;
  MetricTally coverage_;
  std::vector<ValueBins> bins_;
};

}  // namespace epikv
