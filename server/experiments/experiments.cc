#include "server/experiments/experiments.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "runtime/base/steady_time.h"
#include "server/base/durations.h"
#include "server/experiments/definition/edits.h"
#include "server/experiments/figures/report.h"
#include "server/experiments/store/spool.h"
#include "server/experiments/store/sql_store.h"

namespace epikv {
namespace {

constexpr absl::Duration kLookEvery = absl::Seconds(1);
constexpr absl::Duration kForgetEvery = absl::Hours(1);

bool Runs(const v1::Experiment& experiment) {
  return experiment.state() == v1::Experiment::STATE_RUNNING;
}

v1::PairSeen::Answer AnswerOf(const Divergence& found) {
  v1::PairSeen::Answer answer;
  answer.set_tokens(static_cast<uint32_t>(found.tokens));
  answer.set_agreed_tokens(static_cast<uint32_t>(found.agreed));
  answer.set_kl_nats(found.kl_nats);
  return answer;
}

absl::Status Named(absl::string_view flag, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(flag, ": ", status.message()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Experiments>> Experiments::Open(const ExperimentsOptions& options,
                                                               Metrics& metrics, const Log& log) {
  absl::StatusOr<std::unique_ptr<Store>> store = OpenStore(options.store);
  if (!store.ok()) return Named("--experiment_store", store.status());
  absl::StatusOr<std::unique_ptr<Spool>> spool =
      Spool::Open(options.spool, {.max_bytes = options.spool_bytes});
  if (!spool.ok()) return Named("--experiment_spool", spool.status());
  return std::unique_ptr<Experiments>(
      new Experiments(*std::move(store), *std::move(spool), options, metrics, log));
}

Experiments::Experiments(std::unique_ptr<Store> store, std::unique_ptr<Spool> spool,
                         const ExperimentsOptions& options, Metrics& metrics, const Log& log)
    : store_(std::move(store)),
      options_(options),
      metrics_(metrics),
      series_(metrics.OfExperiments()),
      log_(log),
      recorder_(*store_, std::move(spool), series_) {
  Refresh();
  keeper_ = std::thread([this] { Keep(); });
}

Experiments::~Experiments() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  stop_.Signal();
  keeper_.join();
}

absl::StatusOr<Assignment> Experiments::Assign(const Subject& subject) {
  return live_.Assign(subject);
}

void Experiments::OnExcluded(const std::vector<std::string>& experiments) {
  for (const std::string& experiment : experiments) series_.OnExcluded(experiment);
}

void Experiments::OnBegan(v1::RequestBegan began) {
  series_.OnAssigned(began);
  v1::ExperimentRecord record;
  *record.mutable_began() = std::move(began);
  recorder_.Record(std::move(record));
}

void Experiments::OnEnded(v1::RequestEnded ended) {
  v1::ExperimentRecord record;
  *record.mutable_ended() = std::move(ended);
  recorder_.Record(std::move(record));
}

void Experiments::OnShadow(const v1::RequestBegan& began, ShadowFate fate,
                           const Divergence& found) {
  series_.OnShadow(began, fate, found);
  if (fate != ShadowFate::kCompared) return;
  v1::ExperimentRecord record;
  v1::ShadowSeen& seen = *record.mutable_shadow();
  seen.set_id(began.id());
  *seen.mutable_time() = TimestampProto(absl::Now());
  seen.set_tokens(static_cast<uint32_t>(found.tokens));
  seen.set_agreed_tokens(static_cast<uint32_t>(found.agreed));
  seen.set_kl_nats(found.kl_nats);
  recorder_.Record(std::move(record));
}

void Experiments::OnPair(const v1::RequestBegan& began, ShadowFate fate, const PairFound& found) {
  series_.OnPair(began, fate, found);
  v1::ExperimentRecord record;
  v1::PairSeen& seen = *record.mutable_pair();
  seen.set_id(began.id());
  *seen.mutable_time() = TimestampProto(absl::Now());
  if (fate == ShadowFate::kCompared) {
    *seen.mutable_shown() = AnswerOf(found.shown);
    *seen.mutable_hidden() = AnswerOf(found.hidden);
  }
  recorder_.Record(std::move(record));
}

void Experiments::OnShadowWaiting(int64_t requests) { series_.OnShadowWaiting(requests); }

void Experiments::OnShadowTime(absl::Duration spent, bool interrupted) {
  series_.OnShadowTime(spent, interrupted);
}

void Experiments::Record(v1::OutcomeSeen outcome, Recorder::Done done) {
  v1::ExperimentRecord record;
  *record.mutable_outcome() = std::move(outcome);
  recorder_.Record(std::move(record), std::move(done));
}

std::shared_ptr<const std::vector<v1::Experiment>> Experiments::known() const {
  absl::MutexLock lock(&mu_);
  return known_;
}

bool Experiments::SurelyUndeclared(const std::string& metric) const {
  if (!recorder_.store_is_away()) return false;
  absl::MutexLock lock(&mu_);
  if (revision_ < 0) return false;
  return absl::c_none_of(*known_, [&metric](const v1::Experiment& experiment) {
    return absl::c_any_of(experiment.metrics(),
                          [&](const v1::Metric& declared) { return declared.name() == metric; });
  });
}

void Experiments::Refresh() {
  LookAt(store_->Experiments());
  KeepSeries(absl::Now());
}

// What is away, or older than what is known, changes nothing.
void Experiments::LookAt(const absl::StatusOr<Definitions>& definitions) {
  if (!definitions.ok()) return;
  std::vector<v1::Experiment> running;
  for (const v1::Experiment& experiment : definitions->experiments) {
    if (Runs(experiment)) running.push_back(experiment);
  }
  auto known = std::make_shared<const std::vector<v1::Experiment>>(definitions->experiments);
  absl::MutexLock lock(&mu_);
  if (definitions->revision <= revision_) return;
  revision_ = definitions->revision;
  known_ = std::move(known);
  live_.Set(std::move(running));
}

void Experiments::Keep() {
  for (;;) {
    const absl::Time now = absl::Now();
    KeepSeries(now);
    StopEnded(now);
    Judge(now);
    Forget(now);
    int64_t revision = 0;
    {
      absl::MutexLock lock(&mu_);
      auto stopping = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_; };
      if (stop_.Wait(mu_, std::min(kLookEvery, options_.judge_every), stopping)) return;
      revision = revision_;
    }
    const absl::StatusOr<int64_t> stored = store_->Revision();
    Tell(stored.status());
    if (stored.ok() && *stored != revision) Refresh();
  }
}

// Of those that run, and of those that did of late.
void Experiments::KeepSeries(absl::Time now) {
  std::vector<v1::Experiment> kept;
  std::set<std::string, std::less<>> arms;
  absl::MutexLock lock(&series_mu_);
  const auto known = this->known();
  for (const v1::Experiment& experiment : *known) {
    const bool of_late = experiment.state() == v1::Experiment::STATE_STOPPED &&
                         now < TimeOf(experiment.stop_time()) + options_.series_outlive;
    if (!Runs(experiment) && !of_late) continue;
    kept.push_back(experiment);
    for (const v1::Arm& arm : experiment.arms()) {
      arms.insert(absl::StrCat(experiment.name(), "/", arm.name()));
    }
  }
  series_.Keep(kept);
  metrics_.KeepArms(arms);
}

void Experiments::StopEnded(absl::Time now) {
  auto ended = [now](const v1::Experiment& experiment) {
    return experiment.has_end_time() && TimeOf(experiment.end_time()) <= now;
  };
  const auto known = this->known();
  for (const v1::Experiment& experiment : *known) {
    if (!Runs(experiment) || !ended(experiment)) continue;
    if (StopNow(experiment.name(), "end_time", ended)) Refresh();
  }
}

// Another replica may be faster: then there is nothing to do.
bool Experiments::StopNow(const std::string& name, const std::string& reason,
                          absl::FunctionRef<bool(const v1::Experiment&)> still) {
  bool stopped = false;
  const absl::StatusOr<v1::Experiment> changed = store_->Change(
      name, [&](const std::vector<v1::Experiment>& all) -> absl::StatusOr<v1::Experiment> {
        absl::StatusOr<v1::Experiment> found = FindExperiment(all, name);
        stopped = found.ok() && Runs(*found) && still(*found);
        if (!stopped) return found;
        return Stopped(*found, reason, absl::Now());
      });
  if (!changed.ok() || !stopped) return false;
  log_.Warn(absl::StrCat("experiment '", name, "' was stopped: ", reason));
  return true;
}

// Reading takes longer as records grow: it takes a twentieth of the time at most.
void Experiments::Judge(absl::Time now) {
  const absl::Duration began = SteadyTime();
  if (began < judge_next_) return;
  absl::Duration reading;
  const auto known = this->known();
  for (const v1::Experiment& experiment : *known) {
    if (Runs(experiment)) reading += JudgeOne(experiment, now);
  }
  judge_next_ = std::max(began + options_.judge_every, SteadyTime() + 20 * reading);
}

absl::Duration Experiments::JudgeOne(const v1::Experiment& experiment, absl::Time now) {
  const absl::Duration began = SteadyTime();
  const absl::StatusOr<v1::ExperimentReport> report =
      MakeReport(experiment, *store_,
                 {.points = 1, .guardrails_only = true, .lost_after = options_.lost_after}, now);
  if (absl::IsInternal(report.status())) {
    log_.Warn(absl::StrCat("experiment '", experiment.name(),
                           "': its guardrails could not be checked: ", report.status().message()));
    return SteadyTime() - began;
  }
  // What could not be read soon can be when the store is back.
  if (!report.ok()) return absl::ZeroDuration();
  const absl::Duration reading = SteadyTime() - began;
  series_.OnSampleRatio(experiment.name(), report->sample_ratio().p_value());
  for (const v1::GuardrailReport& guardrail : report->guardrails()) {
    if (guardrail.verdict() != v1::GuardrailReport::VERDICT_BREACHED) continue;
    const bool stopped =
        StopNow(experiment.name(),
                absl::StrCat("guardrail/", guardrail.guardrail().metric(), "/", guardrail.arm()),
                [&](const v1::Experiment& still) {
                  return still.bucket_version() == experiment.bucket_version();
                });
    if (!stopped) break;
    series_.OnBreached(experiment.name(), guardrail);
    Refresh();
    break;
  }
  return reading;
}

void Experiments::Forget(absl::Time now) {
  if (options_.retention == absl::InfiniteDuration() || SteadyTime() < forget_next_) return;
  const absl::StatusOr<int64_t> forgotten = store_->Forget(now - options_.retention);
  if (forgotten.ok() && *forgotten == 0) forget_next_ = SteadyTime() + kForgetEvery;
}

void Experiments::Tell(const absl::Status& store) {
  if (store.ok() != away_) return;
  away_ = !store.ok();
  log_.Warn(away_ ? absl::StrCat("the experiment store cannot be reached: ", store.message(),
                                 "; records wait in the spool")
                  : "the experiment store can be reached again");
}

}  // namespace epikv
