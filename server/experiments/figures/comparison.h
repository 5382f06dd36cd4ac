#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/types/span.h"
#include "server/experiments/figures/confidence_sequence.h"
#include "server/experiments/figures/metric_tally.h"

// What an experiment's sums say about arms. Everything here may be asked for at every moment: alpha
// is the chance that a comparison (one arm with the control, in one metric) is ever wrong, over all
// looks. It is not shared out among comparisons by itself: see AlphaPerArm.

namespace epikv {

enum class MetricKind {
  kMean,
  kProportion,  // all observations are 0 or 1
};

struct AnalysisOptions {
  MetricKind kind = MetricKind::kMean;
  double alpha = .05;  // in (0, 1)
  // The size of differences, in the metric's units, for which sequences of a difference are to be
  // tight (TightestSpread, or a plan's tau); > 0. It must not be chosen by looking at the data.
  // Absent: kDefaultTau standard deviations of single observations.
  std::optional<double> tau;
};

// With it sequences are tightest when there are about 1600 independent observations in each of two
// equal arms, and their bounds less than a seventh wider than they could be with from 300 to
// 75,000.
inline constexpr double kDefaultTau = .1;

// An arm says nothing by asymptotic sequences before it has so many units, and so many effective
// units (ArmEstimate; for a proportion about: ones, or zeros if these are fewer). Where they begin
// to hold alpha: tests/experiments/experiment_simulation_test.cc.
inline constexpr int64_t kLeastUnits = 100;
inline constexpr double kLeastEffectiveUnits = 25;
// Of one arm's mean: of a difference, much of what is skewed cancels out.
inline constexpr double kLeastEffectiveUnitsAlone = 50;
// By exact sequences an arm of a proportion says something from so many units on.
inline constexpr int64_t kLeastExactUnits = 10;

// alpha for one of several arms that are compared with a control in the primary metric, so that the
// chance that any is wrong is alpha (Bonferroni). Precondition: num_arms >= 2, the control among
// them. Guardrails keep alpha each: one that alarms by mistake stops one experiment.
double AlphaPerArm(double alpha, int num_arms);

// How alpha is shared among what is said of subgroups (Bonferroni): the chance that any interval of
// any arm in any subgroup is ever wrong is alpha; and so is, apart from that, the chance that
// differences are ever said to differ between subgroups where they do not.
struct SubgroupCounts {
  int arms = 2;       // the control among them
  int divisions = 1;  // ways to put units into classes
  int classes = 2;    // of all divisions together
};
struct SubgroupAlphas {
  double interval = 0;       // of one arm in one subgroup
  double heterogeneity = 0;  // of one arm in one division
};
// Precondition: two arms, a division and two classes at least.
SubgroupAlphas AlphaPerSubgroup(double alpha, const SubgroupCounts& counts);

// What intervals rest on.
enum class Basis {
  kTooEarly,    // nothing is said: intervals are unbounded, p-values 1
  kExact,       // ProportionSequence, of each arm by itself; see ReadArm
  kAsymptotic,  // MixtureBound
};

struct ArmReading {
  Basis basis = Basis::kTooEarly;
  ArmEstimate observed;        // how much there is, and not adjusted
  std::optional<double> mean;  // adjusted by the covariate; absent without observations
  Interval interval;           // of the mean
};

// Whether an arm has had a hand in the covariate: its mean, or the share of units that have one,
// differs between arms by more than chance: p < kCovariateAlarm at any look, always valid, once all
// arms have kLeastUnits. What follows does not adjust by such a covariate: with a chance of 1 -
// alpha - kCovariateAlarm intervals hold at every look all the same, for those that are adjusted
// and those that are not do.
bool CovariateDiffers(const MetricSums& sums);
inline constexpr double kCovariateAlarm = .001;

// An arm's mean. A proportion has an exact sequence as long as each unit has one observation, and
// until it has kLeastUnits and kLeastEffectiveUnitsAlone. Trials are then as many as there are
// units, as far as observations are spread over them (Kish): too few rather than too many, for
// those of a unit count as one. Exact sequences do without the covariate. Precondition: the arm
// exists.
ArmReading ReadArm(const MetricSums& sums, size_t arm, const AnalysisOptions& options);

// mean(treatment) / mean(control) - 1, in parts of 1. All values that are not excluded, some of
// which may be infinite: where the control's mean may be 0, there is no other honest set.
struct Lift {
  enum class Set {
    kInterval,  // `interval`
    kTwoRays,   // up to interval.lower, and from interval.upper on
    kAll,       // nothing is excluded
  };
  Set set = Set::kAll;
  Interval interval;
  std::optional<double> estimate;  // absent where the control's mean is 0

  bool Holds(double lift) const;
};

// treatment - control.
struct Comparison {
  Basis basis = Basis::kTooEarly;
  ArmEstimate control, treatment;    // how much there is, and not adjusted
  std::optional<double> difference;  // adjusted; absent while an arm has no observations
  Interval interval;                 // of the difference
  // Of asymptotic comparisons: of the difference, and tau^2 of its sequence.
  double variance = 0, tau_squared = 0;
  // Share of the variance that the covariate has taken out; absent where nothing is adjusted.
  std::optional<double> variance_saved;
  // Always valid, as of this look; a later look may have a greater one. Below alpha exactly where
  // the interval leaves out 0.
  double p_value = 1;
  Lift lift;
};

// Asymptotic, of the adjusted means, once both arms have kLeastUnits and kLeastEffectiveUnits.
//
// A proportion is compared by exact sequences before that, each arm's of alpha / 2: a first failure
// among thousands, or a run of failures, need not wait for failures of the other arm. A mean is
// compared, too, once one arm alone has the effective units. The other one, which hardly varies
// yet, is then taken to vary, by unit, no less than that one: as it does if there is no difference.
//
// The lift is Fieller's set by the same bound: all r at which the test of mean(treatment) -
// (1 + r) mean(control) = 0, always valid for each r, does not reject.
//
// Preconditions: both arms exist and differ.
Comparison Compare(const MetricSums& sums, size_t control, size_t treatment,
                   const AnalysisOptions& options);

// alpha for one of the two metrics of pairs, so that the chance that either interval is ever wrong
// is alpha (Bonferroni).
double AlphaPerPairedMetric(double alpha);

// Of one difference a unit has, as the only arm of `differences`: treatment - control on the same
// prompt. Asymptotic, from kLeastUnits and kLeastEffectiveUnits on, with a tau of kPairTau standard
// deviations of the differences (tests/experiments/pair_simulation_test.cc). `treatment` says how
// much there is; no lift.
Comparison ComparePairs(const MetricSums& differences, double alpha);
// Tightest at about 150 units, for pairs are of thin traffic; up to 5,000 less than a seventh wider
// than it could be.
inline constexpr double kPairTau = .25;

// Whether the difference is the same in all of these comparisons of one pair of arms, in subgroups
// that share no unit. Those that are not asymptotic say nothing yet.
struct Heterogeneity {
  int num_compared = 0;  // below two nothing is said
  double p_value = 1;    // SamenessPValue
};
// tau_squared: of the comparison of all units; 0 as long as that says nothing, and then nor does
// this.
Heterogeneity CompareSubgroups(absl::Span<const Comparison> subgroups, double tau_squared);

enum class Better { kHigher, kLower };

enum class Verdict {
  kTooEarly,
  kUndecided,
  kSafe,      // certainly not worse by more than the margin
  kBreached,  // certainly worse by more than the margin
};

// Non-inferiority of the treatment. With a chance of 1 - alpha no verdict of kSafe or kBreached is
// ever wrong. margin: in the metric's units, >= 0.
Verdict JudgeGuardrail(const Comparison& comparison, Better better, double margin);

}  // namespace epikv
