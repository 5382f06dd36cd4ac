#include "server/experiments/figures/measures.h"

#include <algorithm>
#include <string>

#include "absl/strings/string_view.h"
#include "server/experiments/definition/definition.h"

namespace epikv {
namespace {

bool IsGuarded(const v1::Experiment& experiment, const std::string& metric) {
  return std::any_of(experiment.guardrails().begin(), experiment.guardrails().end(),
                     [&](const v1::Guardrail& guardrail) { return guardrail.metric() == metric; });
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

// What one says that was lost with its server: that it failed, and nothing else.
Observations LostOf(absl::string_view metric) {
  if (metric == "failed") return {1.};
  if (metric == "completed" || metric == "cancelled" || metric == "deadline_missed") return {0.};
  return {};
}

Observations MeasuredOf(absl::string_view metric, const RequestRow& row) {
  if (row.lost) return LostOf(metric);
  return row.end.has_value() ? MeasuredOf(metric, *row.end) : Observations();
}

}  // namespace

MetricKind KindOf(const v1::Metric& metric) {
  return metric.kind() == v1::Metric::KIND_PROPORTION ? MetricKind::kProportion : MetricKind::kMean;
}

Better BetterOf(const v1::Metric& metric) {
  return metric.direction() == v1::Metric::DIRECTION_LOWER_IS_BETTER ? Better::kLower
                                                                     : Better::kHigher;
}

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
    measure.replayed = measured.name == kShadowKlNats || measured.name == kShadowTop1Agreement;
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

double ReplayedOf(const Measure& measure, const ShadowRow& row) {
  const auto agreed = static_cast<double>(row.agreed_tokens);
  const bool is_kl = measure.metric.name() == kShadowKlNats;
  return (is_kl ? row.kl_nats : agreed) / static_cast<double>(row.tokens);
}

Observations ObservationsOf(const Measure& measure, const RequestRow& row) {
  if (measure.replayed) {
    return row.shadow.has_value() ? Observations{ReplayedOf(measure, *row.shadow)} : Observations();
  }
  if (measure.measured) return MeasuredOf(measure.metric.name(), row);
  Observations values;
  for (const OutcomeRow& outcome : row.outcomes) {
    if (outcome.metric == measure.metric.name()) values.push_back(outcome.value);
  }
  return values;
}

std::optional<double> CovariateOf(const v1::Metric& metric, const Owner& owner,
                                  const EarlierMeans* earlier) {
  switch (metric.covariate()) {
    case v1::Metric::COVARIATE_PROMPT_TOKENS:
      return static_cast<double>(owner.prompt_tokens);
    case v1::Metric::COVARIATE_CLIENT:
      return owner.covariate;
    case v1::Metric::COVARIATE_EARLIER:
      return earlier == nullptr ? std::nullopt : earlier->Of(owner.unit);
    default:
      return std::nullopt;
  }
}

}  // namespace epikv
