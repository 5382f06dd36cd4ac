#include "server/experiments/figures/report.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "server/base/durations.h"
#include "server/experiments/definition/assignment.h"
#include "server/experiments/figures/comparison.h"
#include "server/experiments/definition/definition.h"
#include "server/experiments/figures/distribution.h"
#include "server/experiments/figures/metric_tally.h"
#include "server/experiments/figures/sample_ratio.h"
#include "server/experiments/figures/throughput.h"
#include "server/experiments/definition/windows.h"

namespace epikv {
namespace {

// Of a unit in one tally, as flat_hash_map holds it.
constexpr int64_t kBytesPerUnit = 96;

using Observations = std::vector<double>;

// A metric of the report, and how it is read from a request.
struct Measure {
  v1::Metric metric;
  bool primary = false, measured = false, confounded = false, of_windows = false;
};

MetricKind KindOf(const v1::Metric& metric) {
  return metric.kind() == v1::Metric::KIND_PROPORTION ? MetricKind::kProportion : MetricKind::kMean;
}

Better BetterOf(const v1::Metric& metric) {
  return metric.direction() == v1::Metric::DIRECTION_LOWER_IS_BETTER ? Better::kLower
                                                                     : Better::kHigher;
}

bool IsGuarded(const v1::Experiment& experiment, const std::string& metric) {
  return std::any_of(experiment.guardrails().begin(), experiment.guardrails().end(),
                     [&](const v1::Guardrail& guardrail) { return guardrail.metric() == metric; });
}

// The primary metric first, then those that were declared, then the server's own.
std::vector<Measure> MeasuresOf(const v1::Experiment& experiment, bool guardrails_only) {
  std::vector<Measure> measures;
  for (const v1::Metric& metric : experiment.metrics()) measures.push_back({.metric = metric});
  for (const MeasuredMetric& measured : MeasuredMetrics()) {
    if (measured.of_windows && !experiment.has_switchback()) continue;
    Measure& measure = measures.emplace_back();
    measure.metric.set_name(std::string(measured.name));
    measure.metric.set_kind(measured.kind);
    measure.metric.set_direction(measured.direction);
    measure.measured = true;
    measure.confounded = measured.confounded && !experiment.has_switchback();
    measure.of_windows = measured.of_windows;
  }
  for (Measure& measure : measures) {
    measure.primary = measure.metric.name() == experiment.primary_metric();
  }
  std::erase_if(measures, [&](const Measure& measure) {
    return guardrails_only && !IsGuarded(experiment, measure.metric.name());
  });
  std::stable_partition(measures.begin(), measures.end(),
                        [](const Measure& measure) { return measure.primary; });
  return measures;
}

template <typename Value>
Observations One(const std::optional<Value>& value) {
  if (!value.has_value()) return {};
  return {static_cast<double>(*value)};
}

// What a request that has ended says of a metric that the server measures.
Observations MeasuredOf(absl::string_view metric, const EndRow& end) {
  const bool missed = end.code == "DEADLINE_EXCEEDED";
  const bool cancelled = end.code == "CANCELLED";
  const bool completed = end.code == "OK";
  if (metric == "completed") return {completed ? 1. : 0.};
  if (metric == "cancelled") return {cancelled ? 1. : 0.};
  if (metric == "deadline_missed") return {missed ? 1. : 0.};
  if (metric == "failed") return {completed || cancelled || missed ? 0. : 1.};
  if (metric == "output_tokens") return {static_cast<double>(end.output_tokens)};
  if (metric == "request_seconds") return {end.request_seconds};
  if (metric == "kv_peak_tokens") return One(end.kv_peak_tokens);
  if (metric == "kv_evicted_tokens") return One(end.kv_evicted_tokens);
  if (metric == "queue_seconds") return One(end.queue_seconds);
  if (metric == "ttft_seconds") return One(end.ttft_seconds);
  return One(end.time_per_output_token_seconds);
}

Observations MeasuredOf(absl::string_view metric, const RequestRow& row) {
  if (metric == kShadowKlNats || metric == kShadowTop1Agreement) {
    if (!row.shadow.has_value()) return {};
    const auto tokens = static_cast<double>(row.shadow->tokens);
    const bool kl = metric == kShadowKlNats;
    return {(kl ? row.shadow->kl_nats : static_cast<double>(row.shadow->agreed_tokens)) / tokens};
  }
  return row.end.has_value() ? MeasuredOf(metric, *row.end) : Observations();
}

Observations ObservationsOf(const Measure& measure, const RequestRow& row) {
  if (measure.measured) return MeasuredOf(measure.metric.name(), row);
  Observations values;
  for (const OutcomeRow& outcome : row.outcomes) {
    if (outcome.metric == measure.metric.name()) values.push_back(outcome.value);
  }
  return values;
}

std::optional<double> CovariateOf(const v1::Metric& metric, const RequestRow& row) {
  switch (metric.covariate()) {
    case v1::Metric::COVARIATE_PROMPT_TOKENS:
      return static_cast<double>(row.prompt_tokens);
    case v1::Metric::COVARIATE_CLIENT:
      return row.covariate;
    default:
      return std::nullopt;
  }
}

v1::Interval ToProto(const Interval& interval) {
  v1::Interval proto;
  if (std::isfinite(interval.lower)) proto.set_lower(interval.lower);
  if (std::isfinite(interval.upper)) proto.set_upper(interval.upper);
  return proto;
}

v1::Basis ToProto(Basis basis) {
  switch (basis) {
    case Basis::kTooEarly:
      return v1::BASIS_TOO_EARLY;
    case Basis::kExact:
      return v1::BASIS_EXACT;
    case Basis::kAsymptotic:
      return v1::BASIS_ASYMPTOTIC;
  }
  return v1::BASIS_UNSPECIFIED;
}

v1::Effect::Verdict VerdictOf(const Comparison& comparison, const v1::Metric& metric) {
  if (comparison.basis == Basis::kTooEarly) return v1::Effect::VERDICT_TOO_EARLY;
  const bool higher = comparison.interval.lower > 0, lower = comparison.interval.upper < 0;
  if (!higher && !lower) return v1::Effect::VERDICT_UNDECIDED;
  if (metric.direction() == v1::Metric::DIRECTION_UNSPECIFIED) return v1::Effect::VERDICT_DIFFERS;
  const bool better = higher == (BetterOf(metric) == Better::kHigher);
  return better ? v1::Effect::VERDICT_BETTER : v1::Effect::VERDICT_WORSE;
}

v1::GuardrailReport::Verdict ToProto(Verdict verdict) {
  switch (verdict) {
    case Verdict::kTooEarly:
      return v1::GuardrailReport::VERDICT_TOO_EARLY;
    case Verdict::kUndecided:
      return v1::GuardrailReport::VERDICT_UNDECIDED;
    case Verdict::kSafe:
      return v1::GuardrailReport::VERDICT_SAFE;
    case Verdict::kBreached:
      return v1::GuardrailReport::VERDICT_BREACHED;
  }
  return v1::GuardrailReport::VERDICT_UNSPECIFIED;
}

v1::Effect EffectOf(const std::string& arm, const Comparison& comparison,
                    const v1::Metric& metric) {
  v1::Effect effect;
  effect.set_arm(arm);
  effect.set_basis(ToProto(comparison.basis));
  if (comparison.difference.has_value()) effect.set_difference(*comparison.difference);
  *effect.mutable_interval() = ToProto(comparison.interval);
  effect.set_p_value(comparison.p_value);
  if (comparison.lift.estimate.has_value()) effect.set_lift(*comparison.lift.estimate);
  if (comparison.lift.set != Lift::Set::kAll) {
    *effect.mutable_lift_interval() = ToProto(comparison.lift.interval);
    effect.set_lift_is_outside(comparison.lift.set == Lift::Set::kTwoRays);
  }
  effect.set_verdict(VerdictOf(comparison, metric));
  return effect;
}

std::optional<Windows> WindowsOf(const v1::Experiment& experiment) {
  if (!experiment.has_switchback()) return std::nullopt;
  return Windows(experiment.switchback());
}

// The arms of an experiment, by place.
class Arms {
 public:
  explicit Arms(const v1::Experiment& experiment) : experiment_(experiment) {
    for (int i = 0; i < experiment.arms_size(); ++i) {
      if (experiment.arms(i).control()) control_ = static_cast<size_t>(i);
    }
  }
  size_t size() const { return static_cast<size_t>(experiment_.arms_size()); }
  size_t control() const { return control_; }
  const v1::Arm& at(size_t place) const { return experiment_.arms(static_cast<int>(place)); }
  std::optional<size_t> Find(const std::string& name) const {
    for (size_t i = 0; i < size(); ++i) {
      if (at(i).name() == name) return i;
    }
    return std::nullopt;
  }

  // That a window was dealt.
  std::optional<size_t> OfWindow(int64_t window) const {
    const v1::Arm* const arm = ArmOf(experiment_, WindowUnit(window));
    return arm == nullptr ? std::nullopt : Find(arm->name());
  }

 private:
  const v1::Experiment& experiment_;
  size_t control_ = 0;
};

// Whose an observation is.
struct Owner {
  size_t arm = 0;
  uint64_t unit = 0;  // a hash, or a window
};

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
  MetricPart(const Arms& arms, const Measure& measure, double alpha)
      : measure_(measure),
        alpha_(alpha),
        all_(arms, measure, alpha),
        exposed_(arms, measure, alpha),
        coverage_(arms.size()),
        bins_(arms.size()) {}

  void Add(const Owner& owner, const RequestRow& row) {
    if (measure_.of_windows) return;
    const Observations values = ObservationsOf(measure_, row);
    Add(owner, row.exposed, values, CovariateOf(measure_.metric, row));
    if (!measure_.measured && row.end.has_value()) {
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
  // Whether the arms certainly differ in how many of their ended requests have an outcome.
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
  Population all_, exposed_;
  MetricTally coverage_;
  std::vector<ValueBins> bins_;
};

// Who took part, whatever the metric.
class Parties {
 public:
  Parties(const v1::Experiment& experiment, const Arms& arms)
      : experiment_(experiment),
        arms_(arms),
        windows_(WindowsOf(experiment)),
        counts_(arms.size()) {}

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
    if (fresh) known = units_.emplace(unit, Unit{.arm = *arm}).first;
    Count& count = counts_[*arm];
    count.requests += 1;
    count.units += fresh ? 1 : 0;
    count.running += row.end.has_value() ? 0 : 1;
    if (row.exposed) {
      count.exposed_requests += 1;
      count.exposed_units += known->second.exposed ? 0 : 1;
      known->second.exposed = true;
    }
    return Owner{.arm = *arm, .unit = unit};
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
      arm.mutable_points()->Add(count.points.begin(), count.points.end());
    }
  }

 private:
  struct Unit {
    size_t arm = 0;
    bool exposed = false;
  };
  struct Count {
    int64_t requests = 0, units = 0, exposed_requests = 0, exposed_units = 0, running = 0;
    std::vector<v1::ArmPoint> points;
  };
  // Of a unit that is new: the arm in which it was seen; of a window, the one that it was dealt.
  std::optional<size_t> FirstArm(uint64_t unit, size_t seen) const {
    return windows_.has_value() ? arms_.OfWindow(static_cast<int64_t>(unit)) : seen;
  }
  v1::SampleRatio Ratio(int64_t Count::*counted) const {
    std::vector<int64_t> units;
    std::vector<double> weights;
    for (size_t i = 0; i < arms_.size(); ++i) {
      units.push_back(counts_[i].*counted);
      weights.push_back(arms_.at(i).weight_permille());
    }
    const SampleRatio ratio = CheckSampleRatio(units, weights);
    v1::SampleRatio proto;
    proto.set_statistic(ratio.statistic);
    proto.set_p_value(ratio.p_value);
    proto.set_alarm(ratio.alarm());
    return proto;
  }

  const v1::Experiment& experiment_;
  const Arms& arms_;
  const std::optional<Windows> windows_;
  std::vector<Count> counts_;
  absl::flat_hash_map<uint64_t, Unit> units_;
  int64_t forced_ = 0, other_version_ = 0, washed_out_ = 0, crossed_ = 0;
};

// Moments at which series have points, the last one now.
class Timeline {
 public:
  Timeline(const v1::Experiment& experiment, int points, absl::Time now)
      : begin_(TimeOf(experiment.start_time())), points_(points) {
    end_ = experiment.has_stop_time() ? std::min(now, TimeOf(experiment.stop_time())) : now;
  }
  absl::Time At(int point) const { return begin_ + (end_ - begin_) * (point + 1) / points_; }
  int points() const { return points_; }
  absl::Time begin() const { return begin_; }
  absl::Time end() const { return end_; }

 private:
  const absl::Time begin_;
  absl::Time end_;
  const int points_;
};

// Reads requests in order and calls `at_point` with each moment of the timeline in between.
template <typename OnRow, typename AtPoint>
absl::Status ReadAlong(Store& store, const std::string& experiment, const Timeline& timeline,
                       const OnRow& on_row, const AtPoint& at_point) {
  int next = 0;
  const absl::Status status =
      store.ReadRequests({.experiment = experiment}, [&](const RequestRow& row) {
        for (; next + 1 < timeline.points() && row.began > timeline.At(next); ++next) {
          at_point(timeline.At(next));
        }
        on_row(row);
        return absl::OkStatus();
      });
  if (!status.ok()) return status;
  for (; next < timeline.points(); ++next) at_point(timeline.At(next));
  return absl::OkStatus();
}

std::string Units(const v1::Experiment& experiment) {
  return experiment.has_switchback() ? "windows" : "units";
}

std::string Blocked(const v1::ExperimentReport& report) {
  if (!report.sample_ratio().alarm() || !report.experiment().sample_ratio_explanation().empty()) {
    return "";
  }
  return absl::StrFormat(
      "%1$s are not split as the weights say (p = %2$.2g): something keeps or loses %1$s of one "
      "arm, "
      "and a comparison would mistake that for an effect. Find out what, and say so in "
      "sample_ratio_explanation",
      Units(report.experiment()), report.sample_ratio().p_value());
}

class ReportMaker {
 public:
  ReportMaker(const v1::Experiment& experiment, Store& store, const ReportOptions& options,
              absl::Time now)
      : experiment_(experiment),
        store_(store),
        options_(options),
        now_(now),
        arms_(experiment),
        windows_(WindowsOf(experiment)),
        timeline_(experiment, options.points, now),
        measures_(MeasuresOf(experiment, options.guardrails_only)) {
    *report_.mutable_experiment() = experiment;
    *report_.mutable_as_of() = TimestampProto(now);
  }

  absl::StatusOr<v1::ExperimentReport> Make() {
    if (absl::Status status = ReadParties(); !status.ok()) return status;
    report_.set_blocked(Blocked(report_));
    // Two populations, and the coverage.
    const int64_t bytes = std::max<int64_t>(1, units_) * kBytesPerUnit * 3;
    const auto at_once = static_cast<size_t>(std::max<int64_t>(1, options_.memory_bytes / bytes));
    for (size_t first = 0; first < measures_.size(); first += at_once) {
      const size_t last = std::min(measures_.size(), first + at_once);
      if (absl::Status status = ReadMetrics(first, last); !status.ok()) return status;
    }
    AddNotes();
    return std::move(report_);
  }

 private:
  absl::Status ReadParties() {
    Parties parties(experiment_, arms_);
    absl::Status status = ReadAlong(
        store_, experiment_.name(), timeline_, [&](const RequestRow& row) { parties.Add(row); },
        [&](absl::Time time) { parties.AddPoint(time); });
    parties.Report(report_);
    units_ = parties.units();
    if (windows_.has_value()) {
      units_ = std::max(units_, (timeline_.end() - timeline_.begin()) / windows_->length());
    }
    return status;
  }
  absl::Status ReadMetrics(size_t first, size_t last) {
    Parties parties(experiment_, arms_);
    std::vector<std::unique_ptr<MetricPart>> parts;
    for (size_t i = first; i < last; ++i) {
      parts.push_back(std::make_unique<MetricPart>(arms_, measures_[i], AlphaOf(measures_[i])));
    }
    std::optional<Throughput> throughput;
    if (windows_.has_value()) {
      throughput.emplace(*windows_, timeline_.begin(), timeline_.end(), now_);
    }
    absl::Status status = ReadAlong(
        store_, experiment_.name(), timeline_,
        [&](const RequestRow& row) {
          const std::optional<Owner> owner = parties.Add(row);
          if (!owner.has_value()) return;
          if (throughput.has_value()) throughput->Add(row);
          for (const auto& part : parts) part->Add(*owner, row);
        },
        [&](absl::Time time) {
          if (throughput.has_value()) AddWindows(throughput->Take(time), parts);
          for (const auto& part : parts) part->AddPoint(time);
        });
    if (!status.ok()) return status;
    for (const auto& part : parts) AddMetric(*part);
    return absl::OkStatus();
  }
  void AddWindows(const std::vector<WindowOutput>& windows,
                  const std::vector<std::unique_ptr<MetricPart>>& parts) const {
    for (const WindowOutput& window : windows) {
      const std::optional<size_t> arm = arms_.OfWindow(window.window);
      if (!arm.has_value()) continue;
      const Owner owner = {.arm = *arm, .unit = static_cast<uint64_t>(window.window)};
      for (const auto& part : parts) part->Add(owner, window);
    }
  }
  double AlphaOf(const Measure& measure) const {
    return measure.primary ? AlphaPerArm(experiment_.alpha(), experiment_.arms_size())
                           : experiment_.alpha();
  }

  void AddMetric(const MetricPart& part) {
    const v1::Metric& metric = part.measure().metric;
    *report_.add_metrics() = part.Report(!report_.blocked().empty());
    if (part.has_distribution()) {
      std::vector<v1::Distribution> distributions = DistributionsOf(metric.name(), part.bins());
      for (size_t arm = 0; arm < arms_.size(); ++arm) {
        *report_.mutable_arms(static_cast<int>(arm))->add_distributions() =
            std::move(distributions[arm]);
      }
    }
    for (size_t arm = 0; arm < arms_.size(); ++arm) {
      if (arm == arms_.control()) continue;
      if (part.CoverageDiffers(arms_.control(), arm)) {
        report_.add_notes(absl::StrCat(
            "of '", arms_.at(arm).name(), "' ", Percent(part.all().Coverage(arm)),
            " of requests have an outcome of '", metric.name(), "', of '",
            arms_.at(arms_.control()).name(), "' ", Percent(part.all().Coverage(arms_.control())),
            ": who answers depends on the arm, and so may the figure"));
      }
      AddGuardrails(part, arm);
    }
  }
  void AddGuardrails(const MetricPart& part, size_t arm) {
    for (const v1::Guardrail& guardrail : experiment_.guardrails()) {
      if (guardrail.metric() != part.measure().metric.name()) continue;
      const Comparison comparison = part.all().Compared(arm, experiment_.alpha());
      v1::GuardrailReport& report = *report_.add_guardrails();
      *report.mutable_guardrail() = guardrail;
      report.set_arm(arms_.at(arm).name());
      report.set_verdict(
          ToProto(JudgeGuardrail(comparison, BetterOf(part.measure().metric), guardrail.margin())));
      if (comparison.difference.has_value()) report.set_difference(*comparison.difference);
      *report.mutable_interval() = ToProto(comparison.interval);
    }
  }

  void AddNotes() {
    uint64_t requests = 0, exposed = 0;
    for (const v1::ArmReport& arm : report_.arms()) {
      requests += arm.requests();
      exposed += arm.exposed_requests();
    }
    if (requests > 0 && exposed == 0) {
      report_.add_notes(
          "in no request could eviction act: its prompt and longest output fit the "
          "smallest budget, and the arms cannot differ");
    }
    if (report_.sample_ratio().alarm() && report_.blocked().empty()) {
      report_.add_notes(absl::StrCat(Units(experiment_),
                                     " are not split as the weights say; explained: ",
                                     experiment_.sample_ratio_explanation()));
    }
    if (report_.exposed_sample_ratio().alarm() && !report_.sample_ratio().alarm()) {
      report_.add_notes(absl::StrFormat(
          "exposed %1$s are not split as the weights say, though all %1$s are: do not "
          "trust figures of the exposed",
          Units(experiment_)));
    }
    if (report_.crossed_requests() > 0) {
      report_.add_notes(absl::StrCat(
          report_.crossed_requests(),
          windows_.has_value() ? " requests ran under another arm than their window's; "
                               : " requests are of units that were seen in another arm before; ",
          "they are left out"));
    }
    if (!windows_.has_value()) {
      report_.add_notes(
          "the arms share one queue, one batch and one KV pool: figures of time are those "
          "of the mixture, and no arm's own");
      return;
    }
    report_.add_notes(absl::StrCat("the whole server was on one arm at a time, in windows of ",
                                   absl::FormatDuration(windows_->length()),
                                   ": figures of time and output are each arm's own"));
    report_.add_notes(
        absl::StrCat("what began in the first ", absl::FormatDuration(windows_->wash_out()),
                     " of a window, beside what the one before had left, is not analysed: ",
                     report_.washed_out_requests(), " requests"));
    report_.add_notes(
        "output_tokens_per_second: a window counts once the one after it is over, without any "
        "request as 0");
  }
  static std::string Percent(double share) { return absl::StrFormat("%.1f %%", 100 * share); }

  const v1::Experiment& experiment_;
  Store& store_;
  const ReportOptions options_;
  const absl::Time now_;
  const Arms arms_;
  const std::optional<Windows> windows_;
  const Timeline timeline_;
  const std::vector<Measure> measures_;
  int64_t units_ = 0;
  v1::ExperimentReport report_;
};

}  // namespace

absl::StatusOr<v1::ExperimentReport> MakeReport(const v1::Experiment& experiment, Store& store,
                                                const ReportOptions& options, absl::Time now) try {
  return ReportMaker(experiment, store, options, now).Make();
} catch (const std::exception& e) {  // of our figures (require.h), or of Boost's
  return absl::InternalError(absl::StrCat("the report could not be made: ", e.what()));
}

}  // namespace epikv
