#include "server/experiment_series.h"

#include <google/protobuf/util/message_differencer.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "server/experiments/definition.h"

namespace epikv {
namespace {

using prometheus::Counter;
using prometheus::Family;

constexpr absl::string_view kFates[] = {"written", "replayed", "spooled", "dropped", "refused"};
constexpr absl::string_view kOrphans[] = {"conflict", "unknown_request",   "waiting",
                                          "late",     "undeclared_metric", "invalid"};

constexpr absl::string_view kShadowFates[] = {"compared", "displaced", "interrupted", "failed"};

absl::string_view ShadowLabel(ShadowFate fate) { return kShadowFates[static_cast<int>(fate)]; }

absl::string_view OrphanLabel(Recorded why) {
  switch (why) {
    case Recorded::kConflict:
      return "conflict";
    case Recorded::kUnknownRequest:
      return "unknown_request";
    case Recorded::kWaiting:
      return "waiting";
    case Recorded::kLate:
      return "late";
    case Recorded::kUndeclaredMetric:
      return "undeclared_metric";
    case Recorded::kInvalid:
    case Recorded::kWritten:
    case Recorded::kDuplicate:
    case Recorded::kSpooled:
      break;
  }
  return "invalid";
}

std::vector<std::string> ArmsOf(const v1::Experiment& experiment) {
  std::vector<std::string> arms;
  for (const v1::Arm& arm : experiment.arms()) arms.push_back(arm.name());
  return arms;
}

}  // namespace

// Of one experiment with the arms that it has: those go with it.
class ExperimentSeries::OfExperiment {
 public:
  explicit OfExperiment(const v1::Experiment& experiment)
      : arms_(ArmsOf(experiment)),
        declare_(registry_, {{"experiment", experiment.name()}}),
        assignments_(declare_.Counters(
            "epikv_experiment_assignments_total",
            "Requests by what an experiment made of them: an arm by the hash of their unit, an arm "
            "that was forced, or none (of its units, but not eligible, or they did not want to).",
            2 * arms_.size() + 1)),
        exposures_(declare_.Counters("epikv_experiment_exposures_total",
                                     "Requests of an arm, not forced, in which eviction could act "
                                     "under any arm.",
                                     arms_.size())),
        breaches_(declare_.Counters("epikv_experiment_guardrail_breaches_total",
                                    "Guardrails that were found breached here, by arm and metric: "
                                    "each stops its experiment.",
                                    arms_.size() * kMaxMetrics)),
        shadow_requests_(declare_.Counters(
            "epikv_experiment_shadow_requests_total",
            "Sampled requests of an arm by what became of their replay: compared; displaced by "
            "newer ones that waited, too; interrupted by live requests whenever it was tried; "
            "failed, since it was too long, the KV pool had no room or its model has gone.",
            arms_.size() * std::size(kShadowFates))),
        shadow_tokens_(declare_.Counters("epikv_experiment_shadow_tokens_total",
                                         "Output tokens of an arm that were compared with the full "
                                         "cache in replays.",
                                         arms_.size())),
        shadow_agreed_(declare_.Counters("epikv_experiment_shadow_agreed_tokens_total",
                                         "Of epikv_experiment_shadow_tokens_total, those of which "
                                         "the arm and the full cache find the same one likeliest.",
                                         arms_.size())),
        shadow_kl_(declare_.Counters("epikv_experiment_shadow_kl_nats_total",
                                     "Over epikv_experiment_shadow_tokens_total: the divergence of "
                                     "the arm's next-token distribution from the full cache's.",
                                     arms_.size())),
        sample_ratio_(
            declare_
                .Gauges("epikv_experiment_srm_p_value",
                        "Of the split of units against the arms' weights, when guardrails "
                        "were judged last; below 0.001 something keeps or loses units of "
                        "one arm.",
                        1)
                .Add({})) {
    sample_ratio_.Set(1);
    for (const std::string& arm : arms_) {
      for (absl::string_view source : {"hash", "forced"}) {
        assignments_.Add({{"arm", arm}, {"source", std::string(source)}});
      }
      exposures_.Add({{"arm", arm}});
      for (absl::string_view fate : kShadowFates) {
        shadow_requests_.Add({{"arm", arm}, {"outcome", std::string(fate)}});
      }
      for (auto* family : {&shadow_tokens_, &shadow_agreed_, &shadow_kl_}) {
        family->Add({{"arm", arm}});
      }
    }
    Excluded();
  }

  int64_t bound() const { return declare_.bound(); }
  bool Fits(const v1::Experiment& experiment) const { return ArmsOf(experiment) == arms_; }
  Counter& Excluded() { return assignments_.Add({{"arm", "none"}, {"source", "excluded"}}); }
  void OnAssigned(const v1::RequestBegan::Part& part) {
    if (std::find(arms_.begin(), arms_.end(), part.arm()) == arms_.end()) return;
    assignments_.Add({{"arm", part.arm()}, {"source", part.forced() ? "forced" : "hash"}})
        .Increment();
    if (part.exposed() && !part.forced()) exposures_.Add({{"arm", part.arm()}}).Increment();
  }
  void OnShadow(const std::string& arm, ShadowFate fate, const Divergence& found) {
    if (std::find(arms_.begin(), arms_.end(), arm) == arms_.end()) return;
    shadow_requests_.Add({{"arm", arm}, {"outcome", std::string(ShadowLabel(fate))}}).Increment();
    shadow_tokens_.Add({{"arm", arm}}).Increment(AsDouble(found.tokens));
    shadow_agreed_.Add({{"arm", arm}}).Increment(AsDouble(found.agreed));
    shadow_kl_.Add({{"arm", arm}}).Increment(found.kl_nats);
  }
  void OnSampleRatio(double p_value) { sample_ratio_.Set(p_value); }
  void OnBreached(const v1::GuardrailReport& guardrail) {
    breaches_.Add({{"arm", guardrail.arm()}, {"guardrail", guardrail.guardrail().metric()}})
        .Increment();
  }
  std::vector<prometheus::MetricFamily> Collect() const { return registry_.Collect(); }

 private:
  const std::vector<std::string> arms_;
  prometheus::Registry registry_;
  Declarations declare_;
  Family<Counter>&assignments_, &exposures_, &breaches_;
  Family<Counter>&shadow_requests_, &shadow_tokens_, &shadow_agreed_, &shadow_kl_;
  prometheus::Gauge& sample_ratio_;
};

ExperimentSeries::ExperimentSeries(SeriesBudget& budget)
    : budget_(budget),
      declare_(registry_, {}),
      records_(declare_.Counters(
          "epikv_experiment_records_total",
          "Records of experiments (a request began, it ended, an outcome) by what became of them: "
          "written to the store, at once or replayed from the spool, spooled meanwhile; dropped "
          "or, "
          "of outcomes, refused, since neither could take them.",
          std::size(kFates))),
      written_(records_.Add({{"fate", "written"}})),
      replayed_(records_.Add({{"fate", "replayed"}})),
      spooled_(records_.Add({{"fate", "spooled"}})),
      dropped_(records_.Add({{"fate", "dropped"}})),
      refused_(records_.Add({{"fate", "refused"}})),
      orphaned_(declare_.Counters("epikv_outcomes_orphaned_total",
                                  "Outcomes that count for no request, by why.",
                                  std::size(kOrphans))),
      outage_seconds_(declare_
                          .Counters("epikv_experiment_store_outage_seconds_total",
                                    "How long the experiment store has been away.", 1)
                          .Add({})),
      spool_bytes_(declare_
                       .Gauges("epikv_experiment_spool_bytes",
                               "Bytes of records that wait for the experiment store.", 1)
                       .Add({})),
      spool_damaged_bytes_(
          declare_
              .Gauges("epikv_experiment_spool_damaged_bytes",
                      "Bytes of the spool that could not be read, since the start: "
                      "what a crash cut off, or what a disk has changed.",
                      1)
              .Add({})),
      running_(declare_.Gauges("epikv_experiments_running", "Experiments that run.", 1).Add({})),
      shadow_seconds_(declare_
                          .Counters("epikv_experiment_shadow_seconds_total",
                                    "Wall time that replays of finished requests have taken from "
                                    "idle engines; in no other series of steps or requests.",
                                    1)
                          .Add({})),
      shadow_interruptions_(declare_
                                .Counters("epikv_experiment_shadow_interruptions_total",
                                          "Replays that gave way to a live request or a drain.", 1)
                                .Add({})),
      shadow_waiting_(declare_
                          .Gauges("epikv_experiment_shadow_waiting_requests",
                                  "Sampled requests that are held in memory for their replay.", 1)
                          .Add({})) {
  for (absl::string_view why : kOrphans) orphaned_.Add({{"reason", std::string(why)}});
}

ExperimentSeries::~ExperimentSeries() { Keep({}); }

void ExperimentSeries::Keep(absl::Span<const v1::Experiment> experiments) {
  int64_t running = 0;
  absl::MutexLock lock(&mu_);
  std::map<std::string, std::unique_ptr<OfExperiment>, std::less<>> kept;
  for (const v1::Experiment& experiment : experiments) {
    running += experiment.state() == v1::Experiment::STATE_RUNNING;
    const auto known = experiments_.find(experiment.name());
    if (known == experiments_.end() || !known->second->Fits(experiment)) continue;
    kept.insert(experiments_.extract(known));
  }
  running_.Set(AsDouble(running));
  for (const auto& [name, gone] : experiments_) budget_.GiveBack(gone->bound());
  experiments_ = std::move(kept);
  for (const v1::Experiment& experiment : experiments) {
    if (experiments_.contains(experiment.name())) continue;
    auto series = std::make_unique<OfExperiment>(experiment);
    if (!budget_.Take(series->bound())) continue;
    experiments_.emplace(experiment.name(), std::move(series));
  }
}

void ExperimentSeries::OnAssigned(const v1::RequestBegan& began) {
  absl::MutexLock lock(&mu_);
  for (const v1::RequestBegan::Part& part : began.parts()) {
    const auto known = experiments_.find(part.experiment());
    if (known != experiments_.end()) known->second->OnAssigned(part);
  }
}

void ExperimentSeries::OnExcluded(const std::string& experiment) {
  absl::MutexLock lock(&mu_);
  const auto known = experiments_.find(experiment);
  if (known != experiments_.end()) known->second->Excluded().Increment();
}

void ExperimentSeries::OnSampleRatio(const std::string& experiment, double p_value) {
  absl::MutexLock lock(&mu_);
  const auto known = experiments_.find(experiment);
  if (known != experiments_.end()) known->second->OnSampleRatio(p_value);
}

void ExperimentSeries::OnBreached(const std::string& experiment,
                                  const v1::GuardrailReport& guardrail) {
  absl::MutexLock lock(&mu_);
  const auto known = experiments_.find(experiment);
  if (known != experiments_.end()) known->second->OnBreached(guardrail);
}

void ExperimentSeries::OnShadow(const v1::RequestBegan& began, ShadowFate fate,
                                const Divergence& found) {
  absl::MutexLock lock(&mu_);
  for (const v1::RequestBegan::Part& part : began.parts()) {
    const auto known = experiments_.find(part.experiment());
    if (known != experiments_.end()) known->second->OnShadow(part.arm(), fate, found);
  }
}

void ExperimentSeries::OnShadowTime(absl::Duration spent, bool interrupted) {
  shadow_seconds_.Increment(Seconds(spent));
  if (interrupted) shadow_interruptions_.Increment();
}

void ExperimentSeries::OnOrphaned(Recorded why) {
  orphaned_.Add({{"reason", std::string(OrphanLabel(why))}}).Increment();
}

void ExperimentSeries::OnOutage(const absl::Status&) {}

void ExperimentSeries::OnOutageTime(absl::Duration more) {
  outage_seconds_.Increment(Seconds(more));
}

void ExperimentSeries::OnSpool(int64_t bytes, SpoolDamage damage) {
  spool_bytes_.Set(AsDouble(bytes));
  spool_damaged_bytes_.Set(AsDouble(damage.bytes));
}

std::vector<prometheus::MetricFamily> ExperimentSeries::Collect() const {
  std::vector<prometheus::MetricFamily> families = registry_.Collect();
  absl::MutexLock lock(&mu_);
  for (const auto& [name, experiment] : experiments_) {
    std::vector<prometheus::MetricFamily> of_one = experiment->Collect();
    families.insert(families.end(), std::make_move_iterator(of_one.begin()),
                    std::make_move_iterator(of_one.end()));
  }
  return families;
}

}  // namespace epikv
