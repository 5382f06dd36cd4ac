#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/experiments/figures/comparison.h"

// How many units an experiment needs, and what it can find with those it gets: for the sequences of
// comparison.h, of one arm with the control. No simulation: numerical integration from look to
// look.

namespace epikv {

// What is known of the metric before, of the control's options.
struct Baseline {
  MetricKind kind = MetricKind::kMean;
  // Of a mean alone: the standard deviation of units, > 0, in the metric's units. Where units have
  // several observations, of (the unit's sum - mean * its number) / the mean number.
  double sd = 0;
  // Of a proportion alone: the share of ones, in (0, 1). Units have one observation each.
  double rate = 0;
};

// Where the sequence is to be tight.
enum class Tuning {
  // At the default of AnalysisOptions: the experiment need not know of the plan.
  kDefault,
  // At the last look: fewer units are needed, and the experiment must use the plan's tau.
  kLastLook,
};

struct Design {
  double alpha = .05;  // of this comparison over all looks, in (0, 1)
  double power = .8;   // in (alpha, 1): the chance that at one of the looks 0 is excluded
  int looks = 20;      // equally spaced in units, the last when all are there; from 1 to 200
  // Of the units that take part; > 0, together at most 1.
  double control_share = .5, treatment_share = .5;
  double covariate_r2 = 0;  // of the variance, what the covariate explains; in [0, 1)
  // Of a mean: a unit has one difference, the baseline's sd is that of differences, and
  // ComparePairs finds it. Shares, covariate and tuning do not matter.
  bool paired = false;
  Tuning tuning = Tuning::kDefault;
};

struct UnitPlan {
  int64_t units = 0;  // of all arms
  double power = 0;   // with so many
  double tau = 0;     // in the metric's units, for AnalysisOptions
};

// The least number of units (to one part in a thousand) with which a true difference `effect`
// (treatment - control, in the metric's units, not 0) is found with design.power. Looks at which an
// arm may well have too few units or effective units for an asymptotic sequence find nothing; what
// exact sequences would find there comes on top. INVALID_ARGUMENT says what is out of range;
// OUT_OF_RANGE: more than 10^12 units.
absl::StatusOr<UnitPlan> PlanUnits(const Baseline& baseline, double effect, const Design& design);

// The chance that a true difference is found with so many units. INVALID_ARGUMENT; units >= 1.
absl::StatusOr<UnitPlan> PlanPower(const Baseline& baseline, double effect, int64_t units,
                                   const Design& design);

// The least differences, in the metric's units, that are found with design.power.
struct DetectableEffects {
  // Upwards, > 0, and downwards, < 0. Absent: none is found, or a proportion has no room for it.
  std::optional<double> up, down;
};
absl::StatusOr<DetectableEffects> PlanEffects(const Baseline& baseline, int64_t units,
                                              const Design& design);

// The chance that a Brownian motion with this drift is outside [-bounds[k], bounds[k]] * sqrt(t) at
// any of the times t = (k + 1) / bounds.size(): that of standardised statistics to pass their
// bounds at any of equally spaced looks, where `drift` is the mean of the last. Bounds are >= 0 and
// may be infinite. Armitage, McPherson, Rowe 1969, "Repeated significance tests on accumulating
// data", as in Jennison, Turnbull 2000, "Group sequential methods", chapter 19; to about 1e-6.
double CrossingProbability(absl::Span<const double> bounds, double drift);

// The least number of units at which CheckSampleRatio raises its alarm, with a chance of `power`,
// if of arm `arm` a share `loss` of all units gets lost before it is counted. Units: those that are
// counted. At one look, by the non-central chi-squared distribution of Pearson's statistic
// (Guenther 1977); so large that it holds. weights: > 0, of two arms at least; loss in (0, 1),
// power in (kSampleRatioAlarm, 1). INVALID_ARGUMENT.
absl::StatusOr<int64_t> PlanSampleRatioUnits(absl::Span<const double> weights, size_t arm,
                                             double loss, double power);

}  // namespace epikv
