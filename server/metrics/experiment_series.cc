#include "server/metrics/experiment_series.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "server/experiments/definition/definition.h"

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

// The arms' and metrics' names.
std::vector<std::string> NamesOf(const auto& items) {
  std::vector<std::string> names;
  for (const auto& item : items) names.push_back(item.name());
  return names;
}

bool Holds(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Shares, ratings and counts: what an outcome is in is not known.
const Bounds& OutcomeBounds() {
  static const Bounds bounds{0, .1, .25, .5, .75, .9, 1, 2, 5, 10, 100, 1000};
  return bounds;
}

constexpr char kHash[] = "hash", kForced[] = "forced", kWashOut[] = "wash_out";

std::string SourceOf(const v1::RequestBegan::Part& part) {
  return part.forced() ? kForced : part.washed_out() ? kWashOut : kHash;
}

// Of the requests that an arm may have.
std::vector<std::string> SourcesOf(const v1::Experiment& experiment) {
  std::vector<std::string> sources = {kHash, kForced};
  if (experiment.has_switchback()) sources.push_back(kWashOut);
  return sources;
}

}  // namespace

// Of one experiment with the arms that it has: those go with it.
class ExperimentSeries::OfExperiment {
 public:
  explicit OfExperiment(const v1::Experiment& experiment)
      : arms_(NamesOf(experiment.arms())),
        metrics_(NamesOf(experiment.metrics())),
        sources_(SourcesOf(experiment)),
        declare_(registry_, {{"experiment", experiment.name()}}),
        assignments_(declare_.Counters(
            "epikv_experiment_assignments_total",
            "Requests by what an experiment did with them. hash: an arm by the hash of the unit or "
            "window; wash_out: the same, in a wash-out, not analysed; forced: an arm that was "
            "forced; excluded: no arm, since the request is not eligible or opted out.",
            sources_.size() * arms_.size() + 1)),
        exposures_(
            declare_.Counters("epikv_experiment_exposures_total",
                              "Requests of an arm in which eviction could act under any arm. "
                              "Forced requests and those in a wash-out are not counted.",
                              arms_.size())),
        breaches_(declare_.Counters("epikv_experiment_guardrail_breaches_total",
                                    "Guardrails that this daemon found breached, by arm and "
                                    "metric. Each stops its experiment.",
                                    arms_.size() * kMaxMetrics)),
        outcomes_(declare_.Counters("epikv_experiment_outcomes_total",
                                    "Outcomes that count, by metric and by the arm of their "
                                    "request. Requests with a forced arm are left out.",
                                    arms_.size() * metrics_.size())),
        outcome_value_(declare_.Histograms("epikv_experiment_outcome_value",
                                           "Values of outcomes that count. Not for analysis: units "
                                           "that ask often weigh more here than in a report.",
                                           arms_.size() * metrics_.size(), OutcomeBounds())),
        shadow_requests_(declare_.Counters(
            "epikv_experiment_shadow_requests_total",
            "Sampled requests of an arm by the fate of their replay. compared: done; displaced: "
            "newer requests took their place; interrupted: live requests came at every try; "
            "failed: too long, no room in the KV pool, or the model has gone.",
            arms_.size() * std::size(kShadowFates))),
        shadow_tokens_(declare_.Counters("epikv_experiment_shadow_tokens_total",
                                         "Output tokens of an arm that were compared with the full "
                                         "cache in replays.",
                                         arms_.size())),
        shadow_agreed_(declare_.Counters("epikv_experiment_shadow_agreed_tokens_total",
                                         "Of epikv_experiment_shadow_tokens_total: tokens for "
                                         "which arm and full cache have the same likeliest token.",
                                         arms_.size())),
        shadow_kl_(
            declare_.Counters("epikv_experiment_shadow_kl_nats_total",
                              "Sum over epikv_experiment_shadow_tokens_total of the divergence of "
                              "the arm's next-token distribution from that of the full cache.",
                              arms_.size())),
        pairs_(declare_.Counters(
            "epikv_experiment_pairs_total",
            "Requests of an arm that another arm answered, too, by what became of both answers, as "
            "of epikv_experiment_shadow_requests_total.",
            arms_.size() * std::size(kShadowFates))),
        sample_ratio_(declare_
                          .Gauges("epikv_experiment_srm_p_value",
                                  "p-value of how units are split among the arms, against the "
                                  "weights, when guardrails were last checked. Below 0.001, units "
                                  "of one arm are lost or kept back.",
                                  1)
                          .Add({})) {
    sample_ratio_.Set(1);
    for (const std::string& arm : arms_) {
      for (const std::string& source : sources_) {
        assignments_.Add({{"arm", arm}, {"source", source}});
      }
      exposures_.Add({{"arm", arm}});
      for (const std::string& metric : metrics_) {
        outcomes_.Add({{"arm", arm}, {"metric", metric}});
        outcome_value_.Add({{"arm", arm}, {"metric", metric}}, OutcomeBounds());
      }
      for (absl::string_view fate : kShadowFates) {
        shadow_requests_.Add({{"arm", arm}, {"outcome", std::string(fate)}});
        pairs_.Add({{"arm", arm}, {"outcome", std::string(fate)}});
      }
      for (auto* family : {&shadow_tokens_, &shadow_agreed_, &shadow_kl_}) {
        family->Add({{"arm", arm}});
      }
    }
    Excluded();
  }

  int64_t bound() const { return declare_.bound(); }
  bool Fits(const v1::Experiment& experiment) const {
    return NamesOf(experiment.arms()) == arms_ && NamesOf(experiment.metrics()) == metrics_ &&
           SourcesOf(experiment) == sources_;
  }
  Counter& Excluded() { return assignments_.Add({{"arm", "none"}, {"source", "excluded"}}); }
  void OnAssigned(const v1::RequestBegan::Part& part) {
    const std::string source = SourceOf(part);
    // What is not this definition's: it has changed a moment ago.
    if (!Holds(arms_, part.arm()) || !Holds(sources_, source)) return;
    assignments_.Add({{"arm", part.arm()}, {"source", source}}).Increment();
    if (part.exposed() && source == kHash) exposures_.Add({{"arm", part.arm()}}).Increment();
  }
  void OnOutcome(const CountedOutcome& outcome) {
    if (!Holds(arms_, outcome.arm) || !Holds(metrics_, outcome.metric)) return;
    outcomes_.Add({{"arm", outcome.arm}, {"metric", outcome.metric}}).Increment();
    outcome_value_.Add({{"arm", outcome.arm}, {"metric", outcome.metric}}, OutcomeBounds())
        .Observe(outcome.value);
  }
  void OnShadow(const std::string& arm, ShadowFate fate, const Divergence& found) {
    if (!Holds(arms_, arm)) return;
    shadow_requests_.Add({{"arm", arm}, {"outcome", std::string(ShadowLabel(fate))}}).Increment();
    shadow_tokens_.Add({{"arm", arm}}).Increment(AsDouble(found.tokens));
    shadow_agreed_.Add({{"arm", arm}}).Increment(AsDouble(found.agreed));
    shadow_kl_.Add({{"arm", arm}}).Increment(found.kl_nats);
  }
  void OnPair(const std::string& arm, ShadowFate fate) {
    if (!Holds(arms_, arm)) return;
    pairs_.Add({{"arm", arm}, {"outcome", std::string(ShadowLabel(fate))}}).Increment();
  }
  void OnSampleRatio(double p_value) { sample_ratio_.Set(p_value); }
  void OnBreached(const v1::GuardrailReport& guardrail) {
    breaches_.Add({{"arm", guardrail.arm()}, {"guardrail", guardrail.guardrail().metric()}})
        .Increment();
  }
  std::vector<prometheus::MetricFamily> Collect() const { return registry_.Collect(); }

 private:
  const std::vector<std::string> arms_, metrics_, sources_;
  prometheus::Registry registry_;
  Declarations declare_;
  Family<Counter>&assignments_, &exposures_, &breaches_, &outcomes_;
  Family<prometheus::Histogram>& outcome_value_;
  Family<Counter>&shadow_requests_, &shadow_tokens_, &shadow_agreed_, &shadow_kl_, &pairs_;
  prometheus::Gauge& sample_ratio_;
};

ExperimentSeries::ExperimentSeries(SeriesBudget& budget)
    : budget_(budget),
      declare_(registry_, {}),
      records_(declare_.Counters(
          "epikv_experiment_records_total",
          "Records of experiments (request began, request ended, outcome) by their fate. written: "
          "the store took them at once, orphans included; spooled: kept while the store was away; "
          "replayed: written since; dropped: neither store nor spool could take them; refused: the "
          "same, for outcomes.",
          std::size(kFates))),
      written_(records_.Add({{"fate", "written"}})),
      replayed_(records_.Add({{"fate", "replayed"}})),
      spooled_(records_.Add({{"fate", "spooled"}})),
      dropped_(records_.Add({{"fate", "dropped"}})),
      refused_(records_.Add({{"fate", "refused"}})),
      orphaned_(declare_.Counters("epikv_outcomes_orphaned_total",
                                  "By reason: outcomes that count for no request (waiting: not "
                                  "yet), and ends of requests whose beginning was dropped.",
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
              .Counters("epikv_experiment_spool_damaged_bytes_total",
                        "Bytes of the spool that could not be read: what a crash cut off, or what "
                        "a disk has changed.",
                        1)
              .Add({})),
      running_(declare_.Gauges("epikv_experiments_running", "Experiments that run.", 1).Add({})),
      shadow_seconds_(declare_
                          .Counters("epikv_experiment_shadow_seconds_total",
                                    "Wall time that replays took from idle engines. No series of "
                                    "steps or requests includes it.",
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

void ExperimentSeries::OnPair(const v1::RequestBegan& began, ShadowFate fate,
                              const PairFound& /*found*/) {
  absl::MutexLock lock(&mu_);
  for (const v1::RequestBegan::Part& part : began.parts()) {
    const auto known = experiments_.find(part.experiment());
    if (part.pair_arm().empty() || known == experiments_.end()) continue;
    known->second->OnPair(part.arm(), fate);
  }
}

void ExperimentSeries::OnShadowTime(absl::Duration spent, bool interrupted) {
  shadow_seconds_.Increment(Seconds(spent));
  if (interrupted) shadow_interruptions_.Increment();
}

void ExperimentSeries::OnOrphaned(Recorded why) {
  orphaned_.Add({{"reason", std::string(OrphanLabel(why))}}).Increment();
}

void ExperimentSeries::OnOutcome(const CountedOutcome& outcome) {
  absl::MutexLock lock(&mu_);
  const auto known = experiments_.find(outcome.experiment);
  if (known != experiments_.end()) known->second->OnOutcome(outcome);
}

void ExperimentSeries::OnOutageTime(absl::Duration more) {
  outage_seconds_.Increment(Seconds(more));
}

void ExperimentSeries::OnSpool(int64_t bytes, SpoolDamage damage) {
  spool_bytes_.Set(AsDouble(bytes));
  spool_damaged_bytes_.Increment(AsDouble(damage.bytes) - spool_damaged_bytes_.Value());
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
