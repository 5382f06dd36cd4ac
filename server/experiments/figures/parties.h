#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "epikv/v1/experiment.pb.h"
#include "server/base/durations.h"
#include "server/experiments/definition/subgroups.h"
#include "server/experiments/definition/windows.h"
#include "server/experiments/figures/arms.h"
#include "server/experiments/figures/figure_messages.h"
#include "server/experiments/figures/sample_ratio.h"
#include "server/experiments/store/store.h"

namespace epikv {

// Who took part, whatever the metric.
class Parties {
 public:
  Parties(const v1::Experiment& experiment, const Arms& arms, const Subgroups& subgroups)
      : experiment_(experiment),
        arms_(arms),
        subgroups_(subgroups),
        windows_(WindowsOf(experiment)),
        counts_(arms.size()) {
    for (const Division& division : subgroups.divisions()) {
      class_units_.emplace_back(division.names.size(), std::vector<int64_t>(arms.size()));
    }
  }

  // Whose a request is, if it is analysed.
  std::optional<Owner> Add(const RequestRow& row) {
    if (row.forced) {
      ++forced_;
      return std::nullopt;
    }
    const std::optional<size_t> arm = arms_.Find(row.arm);
    if (row.bucket_version != experiment_.bucket_version() || !arm.has_value()) {
      ++other_version_;
      return std::nullopt;
    }
    if (windows_.has_value() && windows_->IsWashedOut(row.began)) {
      ++washed_out_;
      return std::nullopt;
    }
    const uint64_t unit =
        windows_.has_value() ? static_cast<uint64_t>(windows_->At(row.began)) : row.unit;
    auto known = units_.find(unit);
    const bool fresh = known == units_.end();
    if ((fresh ? FirstArm(unit, *arm) : known->second.arm) != *arm) {
      ++crossed_;
      return std::nullopt;
    }
    if (fresh) known = units_.emplace(unit, FirstOf(row, *arm)).first;
    Count& count = counts_[*arm];
    count.requests += 1;
    count.units += fresh ? 1 : 0;
    count.lost += row.lost ? 1 : 0;
    count.running += row.lost || row.end.has_value() ? 0 : 1;
    if (row.exposed) {
      count.exposed_requests += 1;
      count.exposed_units += known->second.exposed ? 0 : 1;
      known->second.exposed = true;
    }
    Owner owner = OwnerOf(unit, known->second);
    owner.first = fresh;
    return owner;
  }
  void AddPoint(absl::Time time) {
    for (Count& count : counts_) {
      v1::ArmPoint& point = count.points.emplace_back();
      *point.mutable_time() = TimestampProto(time);
      point.set_units(static_cast<uint64_t>(count.units));
      point.set_exposed_units(static_cast<uint64_t>(count.exposed_units));
    }
  }
  int64_t units() const { return static_cast<int64_t>(units_.size()); }

  void Report(v1::ExperimentReport& report) const {
    *report.mutable_sample_ratio() = Ratio(&Count::units);
    *report.mutable_exposed_sample_ratio() = Ratio(&Count::exposed_units);
    report.set_forced_requests(static_cast<uint64_t>(forced_));
    report.set_other_version_requests(static_cast<uint64_t>(other_version_));
    report.set_crossed_requests(static_cast<uint64_t>(crossed_));
    report.set_washed_out_requests(static_cast<uint64_t>(washed_out_));
    for (size_t i = 0; i < arms_.size(); ++i) {
      const Count& count = counts_[i];
      v1::ArmReport& arm = *report.add_arms();
      arm.set_arm(arms_.at(i).name());
      arm.set_control(arms_.at(i).control());
      arm.set_weight_permille(arms_.at(i).weight_permille());
      arm.set_requests(static_cast<uint64_t>(count.requests));
      arm.set_units(static_cast<uint64_t>(count.units));
      arm.set_exposed_requests(static_cast<uint64_t>(count.exposed_requests));
      arm.set_exposed_units(static_cast<uint64_t>(count.exposed_units));
      arm.set_running_requests(static_cast<uint64_t>(count.running));
      arm.set_lost_requests(static_cast<uint64_t>(count.lost));
      arm.mutable_points()->Add(count.points.begin(), count.points.end());
    }
    ReportSubgroups(report);
  }

 private:
  // There may be millions.
  struct Unit {
    double covariate = kNone;
    uint32_t prompt_tokens = 0;
    uint8_t arm = 0;
    bool exposed = false;
    Classes classes = {};
  };
  static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  struct Count {
    int64_t requests = 0, units = 0, exposed_requests = 0, exposed_units = 0, running = 0, lost = 0;
    std::vector<v1::ArmPoint> points;
  };
  // Of a unit that is new: the arm in which it was seen; of a window, the one that it was dealt.
  std::optional<size_t> FirstArm(uint64_t unit, size_t seen) const {
    return windows_.has_value() ? arms_.OfWindow(static_cast<int64_t>(unit)) : seen;
  }
  // Its first request is known, and counted in its classes.
  Unit FirstOf(const RequestRow& row, size_t arm) {
    const Unit unit = {.covariate = row.covariate.value_or(kNone),
                       .prompt_tokens = static_cast<uint32_t>(row.prompt_tokens),
                       .arm = static_cast<uint8_t>(arm),
                       .classes = subgroups_.ClassesOf(
                           {.prompt_tokens = row.prompt_tokens, .label = row.subgroup})};
    for (size_t i = 0; i < class_units_.size(); ++i) ++class_units_[i][unit.classes[i]][arm];
    return unit;
  }
  static Owner OwnerOf(uint64_t id, const Unit& unit) {
    return {.arm = unit.arm,
            .unit = id,
            .prompt_tokens = unit.prompt_tokens,
            .covariate = std::isnan(unit.covariate) ? std::nullopt : std::optional(unit.covariate),
            .classes = unit.classes};
  }
  v1::SampleRatio Ratio(int64_t Count::*counted) const {
    std::vector<int64_t> units;
    for (const Count& count : counts_) units.push_back(count.*counted);
    return Ratio(units, 1);
  }
  // of: how many there are to be looked at.
  v1::SampleRatio Ratio(const std::vector<int64_t>& units, size_t of) const {
    std::vector<double> weights;
    for (size_t i = 0; i < arms_.size(); ++i) weights.push_back(arms_.at(i).weight_permille());
    const SampleRatio ratio = CheckSampleRatio(units, weights);
    v1::SampleRatio proto = ToProto(ratio);
    proto.set_alarm(ratio.p_value < kSampleRatioAlarm / static_cast<double>(of));
    return proto;
  }
  void ReportSubgroups(v1::ExperimentReport& report) const {
    for (size_t i = 0; i < class_units_.size(); ++i) {
      const Division& division = subgroups_.divisions()[i];
      v1::SubgroupAnalysis& analysis = *report.add_subgroups();
      analysis.set_by(division.by);
      analysis.set_by_label(division.by_label);
      for (size_t place = 0; place < division.names.size(); ++place) {
        v1::Subgroup& subgroup = *analysis.add_subgroups();
        subgroup.set_name(division.names[place]);
        *subgroup.mutable_sample_ratio() = Ratio(class_units_[i][place], subgroups_.num_classes());
      }
    }
  }

  const v1::Experiment& experiment_;
  const Arms& arms_;
  const Subgroups& subgroups_;
  const std::optional<Windows> windows_;
  std::vector<Count> counts_;
  absl::flat_hash_map<uint64_t, Unit> units_;
  std::vector<std::vector<std::vector<int64_t>>> class_units_;  // by division, class and arm
  int64_t forced_ = 0, other_version_ = 0, washed_out_ = 0, crossed_ = 0;
};

}  // namespace epikv
