#pragma once

#include <optional>
#include <vector>

#include "epikv/v1/experiment.pb.h"
#include "server/experiments/figures/arms.h"
#include "server/experiments/figures/comparison.h"
#include "server/experiments/figures/earlier_outcomes.h"
#include "server/experiments/figures/metric_tally.h"
#include "server/experiments/store/store.h"

namespace epikv {

// Values that one request, or one window, has of a metric.
using Observations = std::vector<double>;

// A metric of the report, and how it is read from a request.
struct Measure {
  v1::Metric metric;
  bool primary = false, measured = false, confounded = false, of_windows = false;
  bool replayed = false;  // measured, by a replay under the full cache
};

MetricKind KindOf(const v1::Metric& metric);
Better BetterOf(const v1::Metric& metric);

// The primary metric first, then those that were declared, then the server's own.
std::vector<Measure> MeasuresOf(const v1::Experiment& experiment, bool guardrails_only);

// Of a replay, a metric that is `replayed`: a mean over its output tokens.
double ReplayedOf(const Measure& measure, const ShadowRow& row);
Observations ObservationsOf(const Measure& measure, const RequestRow& row);
// earlier: of the metric, where its covariate is COVARIATE_EARLIER.
std::optional<double> CovariateOf(const v1::Metric& metric, const Owner& owner,
                                  const EarlierMeans* earlier);

}  // namespace epikv
