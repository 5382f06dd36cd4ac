#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "epikv/v1/experiment.pb.h"
#include "server/experiments/figures/arms.h"
#include "server/experiments/figures/comparison.h"
#include "server/experiments/figures/figure_messages.h"
#include "server/experiments/figures/measures.h"
#include "server/experiments/figures/metric_tally.h"
#include "server/experiments/figures/sample_ratio.h"
#include "server/experiments/store/store.h"

namespace epikv {

// Both arms' answers to the same prompts, of an experiment that has pairs (Experiment.pairs).
class PairPart {
 public:
  // A pair of a request that began before `lost_before` and that nothing is known of is lost. All
  // that is given outlives this.
  PairPart(const v1::Experiment& experiment, const Arms& arms, absl::Time lost_before)
      : experiment_(experiment), arms_(arms), lost_before_(lost_before), counts_(arms.size()) {
    for (const Measure& measure : MeasuresOf(experiment, /*guardrails_only=*/false)) {
      if (measure.replayed) metrics_.push_back({.measure = measure});
    }
  }

  void Add(const Owner& owner, const RequestRow& row) {
    if (row.pair_arm.empty()) return;
    if (!owner.first) {
      ++later_;
      return;
    }
    Count& count = counts_[owner.arm];
    ++count.units;
    const bool compared = row.pair.has_value() && row.pair->shown.has_value();
    count.compared += compared ? 1 : 0;
    count.lost += !compared && IsLost(row) ? 1 : 0;
    if (!compared) return;
    const bool shows_control = owner.arm == arms_.control();
    const ShadowRow& of_control = shows_control ? *row.pair->shown : *row.pair->hidden;
    const ShadowRow& of_arm = shows_control ? *row.pair->hidden : *row.pair->shown;
    for (PairedMetric& metric : metrics_) {
      const double control = ReplayedOf(metric.measure, of_control);
      const double arm = ReplayedOf(metric.measure, of_arm);
      metric.control_sum += control;
      metric.arm_sum += arm;
      metric.differences.Add(0, owner.unit, arm - control);
    }
  }

  void Report(v1::ExperimentReport& report) const {
    v1::PairsReport& pairs = *report.mutable_pairs();
    std::vector<int64_t> lost, settled;
    int64_t compared = 0;
    for (size_t i = 0; i < arms_.size(); ++i) {
      const Count& count = counts_[i];
      lost.push_back(count.lost);
      settled.push_back(count.lost + count.compared);
      compared += count.compared;
      v1::ShownArm& shown = *pairs.add_shown();
      shown.set_arm(arms_.at(i).name());
      shown.set_units(static_cast<uint64_t>(count.units));
      shown.set_compared(static_cast<uint64_t>(count.compared));
      shown.set_lost(static_cast<uint64_t>(count.lost));
      shown.set_waiting(static_cast<uint64_t>(count.units - count.lost - count.compared));
    }
    *pairs.mutable_losses() = ToProto(CheckLosses(lost, settled));
    pairs.set_alpha(experiment_.alpha());
    pairs.set_later_requests(static_cast<uint64_t>(later_));
    const bool withheld =
        !report.blocked().empty() ||
        (pairs.losses().alarm() && experiment_.sample_ratio_explanation().empty());
    const double alpha = AlphaPerPairedMetric(experiment_.alpha());
    for (const PairedMetric& metric : metrics_) {
      v1::PairedMetric& told = *pairs.add_metrics();
      *told.mutable_metric() = metric.measure.metric;
      if (compared > 0) {
        told.set_control_mean(metric.control_sum / static_cast<double>(compared));
        told.set_arm_mean(metric.arm_sum / static_cast<double>(compared));
      }
      const Comparison found = ComparePairs(metric.differences.sums(), alpha);
      if (compared > 1) {
        told.set_difference_sd(std::sqrt(found.treatment.variance * static_cast<double>(compared)));
      }
      if (withheld) continue;
      *told.mutable_effect() = EffectOf(OtherArm(), found, told.metric());
    }
  }

 private:
  struct Count {
    int64_t units = 0, compared = 0, lost = 0;
  };
  struct PairedMetric {
    Measure measure;
    double control_sum = 0, arm_sum = 0;
    MetricTally differences = MetricTally(1);
  };

  bool IsLost(const RequestRow& row) const {
    if (row.pair.has_value() || row.lost) return true;
    return row.end.has_value() && (row.end->code != "OK" || row.began <= lost_before_);
  }
  // Of two.
  const std::string& OtherArm() const { return arms_.at(arms_.control() == 0 ? 1 : 0).name(); }

  const v1::Experiment& experiment_;
  const Arms& arms_;
  const absl::Time lost_before_;
  std::vector<Count> counts_;  // by the arm that was shown
  std::vector<PairedMetric> metrics_;
  int64_t later_ = 0;
};

}  // namespace epikv
