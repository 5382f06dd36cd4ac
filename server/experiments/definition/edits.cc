#include "server/experiments/definition/edits.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/base/reason.h"
#include "server/base/durations.h"
#include "server/experiments/definition/assignment.h"
#include "server/experiments/definition/definition.h"

namespace epikv {
namespace {

absl::Status Refuse(absl::string_view reason, const std::string& message) {
  return WithReason(absl::FailedPreconditionError(message), reason);
}

uint32_t BucketsOf(const v1::Experiment& experiment) {
  return experiment.traffic_permille() * (kNumBuckets / 1000);
}

struct Slice {
  uint32_t begin = 0, end = 0;
};

// Of those of a layer that run, in order.
std::vector<Slice> SlicesOf(const std::string& layer, const std::vector<v1::Experiment>& running) {
  std::vector<Slice> slices;
  for (const v1::Experiment& other : running) {
    if (other.layer() != layer) continue;
    slices.push_back({other.first_bucket(), other.first_bucket() + BucketsOf(other)});
  }
  std::sort(slices.begin(), slices.end(),
            [](const Slice& a, const Slice& b) { return a.begin < b.begin; });
  return slices;
}

std::vector<v1::Experiment> OthersThatRun(const v1::Experiment& experiment,
                                          const std::vector<v1::Experiment>& all) {
  std::vector<v1::Experiment> others;
  for (const v1::Experiment& other : all) {
    if (other.state() == v1::Experiment::STATE_RUNNING && other.name() != experiment.name()) {
      others.push_back(other);
    }
  }
  return others;
}

// The lowest bucket with enough free ones from it on.
absl::StatusOr<uint32_t> FirstFree(const v1::Experiment& experiment,
                                   const std::vector<v1::Experiment>& others) {
  const uint32_t wanted = BucketsOf(experiment);
  uint32_t begin = 0, widest = 0;
  std::vector<Slice> slices = SlicesOf(experiment.layer(), others);
  slices.push_back({kNumBuckets, kNumBuckets});
  for (const Slice& slice : slices) {
    const uint32_t room = slice.begin > begin ? slice.begin - begin : 0;
    if (room >= wanted) return begin;
    widest = std::max(widest, room);
    begin = std::max(begin, slice.end);
  }
  return Refuse("LAYER_FULL",
                absl::StrCat("layer '", experiment.layer(), "' has no room for ",
                             experiment.traffic_permille(),
                             " permille of its units: running experiments leave at most ",
                             widest * 1000 / kNumBuckets, " permille in one piece"));
}

absl::Status CheckConflicts(const v1::Experiment& experiment,
                            const std::vector<v1::Experiment>& others) {
  for (const v1::Experiment& other : others) {
    if (other.layer() == experiment.layer()) continue;
    const uint32_t both = GroupsOf(other) & GroupsOf(experiment);
    if (both == 0) continue;
    return Refuse(
        "ARMS_CONFLICT",
        absl::StrCat("'", other.name(), "' of layer '", other.layer(), "' is running and sets ",
                     GroupNames(both),
                     ", too; put both experiments into one layer, so that they share no unit"));
  }
  return absl::OkStatus();
}

// Sets its slice among those that run.
absl::StatusOr<v1::Experiment> Placed(v1::Experiment experiment,
                                      const std::vector<v1::Experiment>& all) {
  const std::vector<v1::Experiment> others = OthersThatRun(experiment, all);
  if (absl::Status status = CheckConflicts(experiment, others); !status.ok()) return status;
  const absl::StatusOr<uint32_t> first = FirstFree(experiment, others);
  if (!first.ok()) return first.status();
  experiment.set_first_bucket(*first);
  return experiment;
}

}  // namespace

absl::StatusOr<v1::Experiment> FindExperiment(const std::vector<v1::Experiment>& all,
                                              const std::string& name) {
  for (const v1::Experiment& experiment : all) {
    if (experiment.name() == name) return experiment;
  }
  return absl::NotFoundError(absl::StrCat("no experiment '", name, "'"));
}

absl::Status CheckEtag(const v1::Experiment& experiment, const std::string& etag) {
  if (etag.empty() || etag == experiment.etag()) return absl::OkStatus();
  return WithReason(absl::AbortedError(absl::StrCat(
                        "'", experiment.name(), "' has changed since it was read; read it again")),
                    "ETAG");
}

v1::Experiment Drafted(v1::Experiment experiment, absl::Time now) {
  experiment.set_state(v1::Experiment::STATE_DRAFT);
  experiment.set_bucket_version(0);
  experiment.set_first_bucket(0);
  *experiment.mutable_create_time() = TimestampProto(now);
  experiment.clear_start_time();
  experiment.clear_stop_time();
  experiment.clear_stop_reason();
  experiment.clear_etag();
  return experiment;
}

absl::StatusOr<v1::Experiment> Started(const v1::Experiment& experiment,
                                       const std::vector<v1::Experiment>& all, absl::Time now) {
  if (experiment.state() == v1::Experiment::STATE_RUNNING) return experiment;
  if (experiment.state() == v1::Experiment::STATE_STOPPED) {
    return Refuse("EXPERIMENT_STATE",
                  absl::StrCat("'", experiment.name(),
                               "' was stopped and cannot start again: old and new findings would "
                               "mix; create another experiment"));
  }
  if (experiment.primary_metric().empty()) {
    return Refuse("EXPERIMENT_STATE",
                  absl::StrCat("'", experiment.name(),
                               "' names no primary_metric: set it before the start, so that the "
                               "metric that decides is chosen before there are results"));
  }
  if (experiment.has_end_time() && TimeOf(experiment.end_time()) <= now) {
    return Refuse("EXPERIMENT_STATE",
                  absl::StrCat("the end_time of '", experiment.name(), "' has passed"));
  }
  absl::StatusOr<v1::Experiment> started = Placed(experiment, all);
  if (!started.ok()) return started;
  started->set_state(v1::Experiment::STATE_RUNNING);
  started->set_bucket_version(1);
  *started->mutable_start_time() = TimestampProto(now);
  return started;
}

absl::StatusOr<v1::Experiment> Stopped(const v1::Experiment& experiment, const std::string& reason,
                                       absl::Time now) {
  if (experiment.state() == v1::Experiment::STATE_STOPPED) return experiment;
  if (experiment.state() != v1::Experiment::STATE_RUNNING) {
    return Refuse("EXPERIMENT_STATE", absl::StrCat("'", experiment.name(), "' is not running"));
  }
  v1::Experiment stopped = experiment;
  stopped.set_state(v1::Experiment::STATE_STOPPED);
  stopped.set_stop_reason(reason);
  *stopped.mutable_stop_time() = TimestampProto(now);
  return stopped;
}

absl::StatusOr<v1::Experiment> Changed(const v1::Experiment& experiment, v1::Experiment wanted,
                                       bool allow_rebucket,
                                       const std::vector<v1::Experiment>& all) {
  if (experiment.state() != v1::Experiment::STATE_DRAFT && Redecides(experiment, wanted)) {
    return Refuse("DECIDED",
                  absl::StrCat("'", experiment.name(),
                               "' has started: alpha, primary_metric, subgroups, pairs and the "
                               "metrics that it declared can no longer change; create another "
                               "experiment"));
  }
  const bool moves = Rebuckets(experiment, wanted);
  if (!moves || experiment.state() == v1::Experiment::STATE_DRAFT) return wanted;
  if (experiment.state() == v1::Experiment::STATE_STOPPED) {
    return Refuse(
        "EXPERIMENT_STATE",
        absl::StrCat(
            "'", experiment.name(),
            "' has stopped: its arms, layer, traffic and eligibility can no longer change"));
  }
  if (!allow_rebucket) {
    return Refuse(
        "REBUCKET",
        absl::StrCat("'", experiment.name(),
                     "' is running, and this change would move units between arms; allow_rebucket "
                     "permits it: units are dealt anew, and earlier requests are counted apart"));
  }
  wanted.set_bucket_version(experiment.bucket_version() + 1);
  return Placed(std::move(wanted), all);
}

std::vector<std::string> SettableFields() {
  return {"hypothesis",     "sample_ratio_explanation",
          "arms",           "eligibility",
          "layer",          "traffic_permille",
          "salt",           "switchback",
          "subgroups",      "pairs",
          "metrics",        "primary_metric",
          "guardrails",     "alpha",
          "outcome_window", "end_time"};
}

}  // namespace epikv
