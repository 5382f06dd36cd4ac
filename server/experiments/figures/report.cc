#include "server/experiments/figures/report.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "runtime/base/steady_time.h"
#include "server/base/durations.h"
#include "server/experiments/definition/definition.h"
#include "server/experiments/definition/subgroups.h"
#include "server/experiments/definition/windows.h"
#include "server/experiments/figures/arms.h"
#include "server/experiments/figures/comparison.h"
#include "server/experiments/figures/distribution.h"
#include "server/experiments/figures/earlier_outcomes.h"
#include "server/experiments/figures/figure_messages.h"
#include "server/experiments/figures/measures.h"
#include "server/experiments/figures/metric_part.h"
#include "server/experiments/figures/pair_part.h"
#include "server/experiments/figures/parties.h"
#include "server/experiments/figures/subgroup_part.h"
#include "server/experiments/figures/throughput.h"

namespace epikv {
namespace {

// Of a unit in one tally, as flat_hash_map holds it.
constexpr int64_t kBytesPerUnit = 96;

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

std::string Units(const v1::Experiment& experiment) {
  return experiment.has_switchback() ? "windows" : "units";
}

std::string Blocked(const v1::ExperimentReport& report) {
  if (!report.sample_ratio().alarm() || !report.experiment().sample_ratio_explanation().empty()) {
    return "";
  }
  return absl::StrFormat(
      "%1$s are not split as the weights say (p = %2$.2g): some %1$s of one arm are lost or kept "
      "back, and a comparison would take that for an effect. Find the cause, and write it into "
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
        lost_before_(std::min(now, SteadyNow()) - options.lost_after),
        arms_(experiment),
        subgroups_(options.guardrails_only ? Subgroups() : Subgroups(experiment)),
        windows_(WindowsOf(experiment)),
        timeline_(experiment, options.points, now),
        measures_(MeasuresOf(experiment, options.guardrails_only)) {
    *report_.mutable_experiment() = experiment;
    *report_.mutable_as_of() = TimestampProto(now);
  }

  absl::StatusOr<v1::ExperimentReport> Make() {
    if (absl::Status status = ReadParties(); !status.ok()) return status;
    absl::StatusOr<EarlierOutcomes> earlier =
        ReadEarlierOutcomes(experiment_, WithEarlier(), store_, options_.cancelled);
    if (!earlier.ok()) return earlier.status();
    earlier_ = *std::move(earlier);
    // Two populations, the coverage, and one more in each division.
    const int64_t tallies = 3 + static_cast<int64_t>(subgroups_.divisions().size());
    const int64_t bytes = std::max<int64_t>(1, units_) * kBytesPerUnit * tallies;
    const auto at_once = static_cast<size_t>(std::max<int64_t>(1, options_.memory_bytes / bytes));
    for (size_t first = 0; first < measures_.size(); first += at_once) {
      const size_t last = std::min(measures_.size(), first + at_once);
      if (absl::Status status = ReadMetrics(first, last); !status.ok()) return status;
    }
    AddNotes();
    return std::move(report_);
  }

 private:
  // Reads requests in order and calls `at_point` with each moment of the timeline in between.
  template <typename OnRow, typename AtPoint>
  absl::Status ReadAlong(const OnRow& on_row, const AtPoint& at_point) {
    constexpr int64_t kAskEvery = 1000;
    int next = 0;
    int64_t rows = 0;
    const absl::Status status =
        store_.ReadRequests({.experiment = experiment_.name()}, [&](const RequestRow& row) {
          if (rows++ % kAskEvery == 0 && options_.cancelled()) {
            return absl::CancelledError("nobody waits for the report any more");
          }
          for (; next + 1 < timeline_.points() && row.began > timeline_.At(next); ++next) {
            at_point(timeline_.At(next));
          }
          if (!row.end.has_value() && row.began <= lost_before_) {
            RequestRow lost = row;
            lost.lost = true;
            on_row(lost);
          } else {
            on_row(row);
          }
          return absl::OkStatus();
        });
    if (!status.ok()) return status;
    for (; next < timeline_.points(); ++next) at_point(timeline_.At(next));
    return absl::OkStatus();
  }
  absl::Status ReadParties() {
    Parties parties(experiment_, arms_, subgroups_);
    std::optional<PairPart> pairs;
    if (experiment_.has_pairs() && !options_.guardrails_only) {
      pairs.emplace(experiment_, arms_, lost_before_);
    }
    absl::Status status = ReadAlong(
        [&](const RequestRow& row) {
          const std::optional<Owner> owner = parties.Add(row);
          if (owner.has_value() && pairs.has_value()) pairs->Add(*owner, row);
        },
        [&](absl::Time time) { parties.AddPoint(time); });
    parties.Report(report_);
    report_.set_blocked(Blocked(report_));
    if (pairs.has_value()) pairs->Report(report_);
    units_ = parties.units();
    if (windows_.has_value()) {
      units_ = std::max(units_, (timeline_.end() - timeline_.begin()) / windows_->length());
    }
    return status;
  }
  absl::Status ReadMetrics(size_t first, size_t last) {
    Parties parties(experiment_, arms_, subgroups_);
    std::vector<std::unique_ptr<MetricPart>> parts;
    for (size_t i = first; i < last; ++i) {
      parts.push_back(std::make_unique<MetricPart>(arms_, measures_[i], AlphaOf(measures_[i]),
                                                   EarlierOf(measures_[i])));
    }
    std::optional<SubgroupPart> subgroups;
    if (measures_[first].primary) {  // the first of all
      subgroups.emplace(experiment_, arms_, subgroups_, measures_[first],
                        EarlierOf(measures_[first]));
    }
    std::optional<Throughput> throughput;
    if (windows_.has_value()) {
      throughput.emplace(*windows_, timeline_.begin(), timeline_.end(), now_);
    }
    absl::Status status = ReadAlong(
        [&](const RequestRow& row) {
          const std::optional<Owner> owner = parties.Add(row);
          if (!owner.has_value()) return;
          if (throughput.has_value()) throughput->Add(row);
          for (const auto& part : parts) part->Add(*owner, row);
          if (subgroups.has_value()) subgroups->Add(*owner, row);
        },
        [&](absl::Time time) {
          if (throughput.has_value()) AddWindows(throughput->Take(time), parts);
          for (const auto& part : parts) part->AddPoint(time);
        });
    if (!status.ok()) return status;
    for (const auto& part : parts) AddMetric(*part);
    if (subgroups.has_value()) subgroups->Report(parts.front()->all(), report_);
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
  // Of those that are measured: a look at guardrails alone reads no more than they need.
  std::vector<std::string> WithEarlier() const {
    std::vector<std::string> metrics;
    for (const Measure& measure : measures_) {
      if (measure.metric.covariate() == v1::Metric::COVARIATE_EARLIER) {
        metrics.push_back(measure.metric.name());
      }
    }
    return metrics;
  }
  const EarlierMeans* EarlierOf(const Measure& measure) const {
    const auto found = earlier_.find(measure.metric.name());
    return found == earlier_.end() ? nullptr : &found->second;
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
    if (part.all().CovariateDiffers()) {
      report_.add_notes(absl::StrCat("the covariate of '", metric.name(),
                                     "' differs between arms by more than chance: an arm has had a "
                                     "hand in it, or in who has an "
                                     "outcome, so '",
                                     metric.name(), "' is not adjusted by it"));
    }
    for (size_t arm = 0; arm < arms_.size(); ++arm) {
      if (arm == arms_.control()) continue;
      if (part.CoverageDiffers(arms_.control(), arm)) {
        report_.add_notes(absl::StrCat(
            "of '", arms_.at(arm).name(), "' ", Percent(part.all().Coverage(arm)),
            " of requests have an outcome of '", metric.name(), "', of '",
            arms_.at(arms_.control()).name(), "' ", Percent(part.all().Coverage(arms_.control())),
            ": the share of requests with an outcome differs by arm, so the difference in '",
            metric.name(), "' may come from that"));
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
    uint64_t requests = 0, exposed = 0, lost = 0;
    for (const v1::ArmReport& arm : report_.arms()) {
      lost += arm.lost_requests();
      requests += arm.requests();
      exposed += arm.exposed_requests();
    }
    if (requests > 0 && exposed == 0) {
      report_.add_notes(
          "eviction could act in no request: every prompt with its longest output fits into the "
          "smallest budget, so the arms cannot differ");
    }
    if (lost > 0) {
      report_.add_notes(absl::StrCat(
          lost, " requests have no end ", absl::FormatDuration(options_.lost_after),
          " after their beginning: their server ended before them. They count as failed"));
    }
    if (report_.sample_ratio().alarm() && report_.blocked().empty()) {
      report_.add_notes(absl::StrCat(Units(experiment_),
                                     " are not split as the weights say; explained: ",
                                     experiment_.sample_ratio_explanation()));
    }
    if (report_.exposed_sample_ratio().alarm() && !report_.sample_ratio().alarm()) {
      report_.add_notes(
          absl::StrFormat("all %1$s are split as the weights say, but exposed %1$s are not: do not "
                          "trust the figures of exposed %1$s",
                          Units(experiment_)));
    }
    for (const v1::SubgroupAnalysis& analysis : report_.subgroups()) {
      for (const v1::Subgroup& subgroup : analysis.subgroups()) {
        if (!subgroup.sample_ratio().alarm()) continue;
        report_.add_notes(
            absl::StrFormat("units of the subgroup '%s' of %s are not split as the weights say (p "
                            "= %.2g): an arm has "
                            "had a hand in who is in it",
                            subgroup.name(), analysis.by(), subgroup.sample_ratio().p_value()));
      }
    }
    if (report_.pairs().losses().alarm()) {
      report_.add_notes(absl::StrFormat(
          "pairs are not lost alike whichever arm is shown (p = %.2g): an arm has had a hand in "
          "what is compared%s",
          report_.pairs().losses().p_value(),
          experiment_.sample_ratio_explanation().empty() ? ", so their comparison is withheld"
                                                         : ""));
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
          "the arms share one queue, one batch and one KV pool, so their times influence each "
          "other: no difference in times can be put down to an arm");
      return;
    }
    report_.add_notes(absl::StrCat("the whole server was on one arm at a time, in windows of ",
                                   absl::FormatDuration(windows_->length()),
                                   ": figures of time and output are each arm's own"));
    report_.add_notes(absl::StrCat(
        report_.washed_out_requests(), " requests began in the wash-out (the first ",
        absl::FormatDuration(windows_->wash_out()), " of a window) and are not analysed"));
    report_.add_notes(
        "output_tokens_per_second: a window counts once the next window is over; a window without "
        "a request counts as 0");
  }
  static std::string Percent(double share) { return absl::StrFormat("%.1f %%", 100 * share); }

  const v1::Experiment& experiment_;
  Store& store_;
  const ReportOptions options_;
  const absl::Time now_;
  const absl::Time lost_before_;
  const Arms arms_;
  const Subgroups subgroups_;
  const std::optional<Windows> windows_;
  const Timeline timeline_;
  const std::vector<Measure> measures_;
  EarlierOutcomes earlier_;
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
