#include "server/experiments/figures/comparison.h"

#include <algorithm>
#include <boost/math/tools/roots.hpp>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "runtime/base/require.h"

namespace epikv {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kRounding = 1e-12;

// Trials that are independent, and how many of them were ones.
struct Trials {
  double ones = 0, trials = 0;
};

Trials IndependentTrials(const ArmEstimate& arm) {
  const double share = std::clamp(arm.mean.value_or(0), 0., 1.);
  return {.ones = share * arm.spread_units, .trials = arm.spread_units};
}

bool HasExactSequence(const ArmEstimate& arm, const AnalysisOptions& options) {
  return options.kind == MetricKind::kProportion && arm.units >= kLeastExactUnits;
}

bool HasUnits(const ArmEstimate& arm) { return arm.units >= kLeastUnits; }

bool HasEffectiveUnits(const ArmEstimate& arm) {
  return arm.effective_units >= kLeastEffectiveUnits;
}

bool IsAsymptotic(const ArmEstimate& control, const ArmEstimate& treatment, MetricKind kind) {
  if (!HasUnits(control) || !HasUnits(treatment)) return false;
  if (HasEffectiveUnits(control) && HasEffectiveUnits(treatment)) return true;
  return kind == MetricKind::kMean && (HasEffectiveUnits(control) || HasEffectiveUnits(treatment));
}

// Of single observations within these arms.
double ValueVariance(const ArmEstimate& a, const ArmEstimate& b) {
  return (a.value_variance * a.observations + b.value_variance * b.observations) /
         (a.observations + b.observations);
}

double TauSquared(const AnalysisOptions& options, double value_variance) {
  return options.tau.has_value() ? *options.tau * *options.tau
                                 : kDefaultTau * kDefaultTau * value_variance;
}

// Of the covariates of all units about the arms' means.
double CovariateVariance(const MetricSums& sums) {
  double squares = 0, units = 0;
  for (const ArmSums& arm : sums.arms) {
    if (arm.covered > 0) squares += arm.xx - arm.x * arm.x / arm.covered;
    units += arm.covered;
  }
  return squares / units;
}

// Whether estimates by arm differ whose units vary alike.
bool ArmsDiffer(std::vector<Estimated> arms, double unit_variance) {
  if (!(unit_variance > 0)) return false;
  for (Estimated& arm : arms) arm.variance *= unit_variance;
  return SamenessPValue(arms, kDefaultTau * kDefaultTau * unit_variance) < kCovariateAlarm / 2;
}

MetricEstimates EstimateSoundly(const MetricSums& sums) {
  MetricEstimates estimates = Estimate(sums);
  if (estimates.coefficient != 0 && CovariateDiffers(sums)) estimates.coefficient = 0;
  return estimates;
}

// Two adjusted means and what is known of their errors.
struct Pair {
  double control = 0, treatment = 0;
  double control_variance = 0, treatment_variance = 0, covariance = 0;

  // Of treatment - control; positive, also where the covariate explains all.
  double variance() const {
    const double sum = treatment_variance + control_variance;
    return std::max(sum - 2 * covariance, kRounding * sum);
  }
};

// How much is missing from the variance of the mean of an arm that hardly varies, were its units to
// vary as the other's do.
double MissingVariance(const ArmEstimate& arm, const ArmEstimate& other) {
  if (HasEffectiveUnits(arm)) return 0;
  const double by_unit = other.variance * static_cast<double>(other.units);
  return std::max(0., by_unit / static_cast<double>(arm.units) - arm.variance);
}

Pair PairOf(const MetricEstimates& estimates, size_t control, size_t treatment) {
  const ArmEstimate& c = estimates.arms[control];
  const ArmEstimate& t = estimates.arms[treatment];
  return {.control = estimates.Mean(control),
          .treatment = estimates.Mean(treatment),
          .control_variance = estimates.Covariance(control, control) + MissingVariance(c, t),
          .treatment_variance = estimates.Covariance(treatment, treatment) + MissingVariance(t, c),
          .covariance = estimates.Covariance(control, treatment)};
}

std::optional<double> VarianceSaved(const MetricEstimates& estimates, size_t control,
                                    size_t treatment) {
  if (estimates.coefficient == 0) return std::nullopt;
  MetricEstimates plain = estimates;
  plain.coefficient = 0;
  return 1 - PairOf(estimates, control, treatment).variance() /
                 PairOf(plain, control, treatment).variance();
}

std::optional<double> LiftOf(double control, double treatment) {
  if (control == 0) return std::nullopt;
  return treatment / control - 1;
}

// The ratios q with (treatment - q control)^2 <= bound * its variance, a quadratic inequality
// (Fieller 1954, "Some problems in interval estimation"), less 1.
Lift FiellerLift(const Pair& pair, double bound) {
  Lift lift{.estimate = LiftOf(pair.control, pair.treatment)};
  const double square = pair.control * pair.control - bound * pair.control_variance;
  const double half = pair.control * pair.treatment - bound * pair.covariance;
  const double rest = pair.treatment * pair.treatment - bound * pair.treatment_variance;
  const double discriminant = half * half - square * rest;
  if (discriminant < 0 || square == 0) return lift;
  const double root = std::sqrt(discriminant) / std::abs(square);
  lift.set = square > 0 ? Lift::Set::kInterval : Lift::Set::kTwoRays;
  lift.interval = {.lower = half / square - root - 1, .upper = half / square + root - 1};
  return lift;
}

// 0 <= both. Of intervals that hold together.
Lift LiftOfIntervals(const Interval& control, const Interval& treatment) {
  Lift lift{.set = Lift::Set::kInterval};
  lift.interval.lower = treatment.lower / control.upper - 1;
  lift.interval.upper = control.lower > 0 ? treatment.upper / control.lower - 1 : kInfinity;
  return lift;
}

// The least alpha at which sequences of alpha / 2 each part. From a's share to b's the evidence of
// a rises and that of b falls: the share that is excluded last is where they are equal.
double ExactPValue(const Trials& a, const Trials& b) {
  const double share_a = a.ones / a.trials, share_b = b.ones / b.trials;
  const ProportionEvidence of_a(a.ones, a.trials), of_b(b.ones, b.trials);
  const auto excess = [&](double share) {
    return std::clamp(of_a.Against(share) - of_b.Against(share), -1e300, 1e300);
  };
  // Elsewhere a share is left against which neither has evidence.
  if (excess(share_a) >= 0 || excess(share_b) <= 0) return 1;
  std::uintmax_t iterations = 200;
  const auto [left, right] = boost::math::tools::toms748_solve(
      excess, std::min(share_a, share_b), std::max(share_a, share_b),
      boost::math::tools::eps_tolerance<double>(40), iterations);
  return std::min(1., 2 * std::exp(-of_a.Against((left + right) / 2)));
}

void CompareExactly(const AnalysisOptions& options, Comparison& comparison) {
  const Trials control = IndependentTrials(comparison.control);
  const Trials treatment = IndependentTrials(comparison.treatment);
  const Interval c = ProportionSequence(control.ones, control.trials, options.alpha / 2);
  const Interval t = ProportionSequence(treatment.ones, treatment.trials, options.alpha / 2);
  comparison.basis = Basis::kExact;
  comparison.difference = *comparison.treatment.mean - *comparison.control.mean;
  comparison.interval = {.lower = t.lower - c.upper, .upper = t.upper - c.lower};
  comparison.p_value = ExactPValue(control, treatment);
  comparison.lift = LiftOfIntervals(c, t);
  comparison.lift.estimate = LiftOf(*comparison.control.mean, *comparison.treatment.mean);
}

void CompareAsymptotically(const Pair& pair, const AnalysisOptions& options,
                           Comparison& comparison) {
  const double tau_squared =
      TauSquared(options, ValueVariance(comparison.control, comparison.treatment));
  const double spread = tau_squared / pair.variance();
  const double bound = MixtureBound(spread, options.alpha);
  const double difference = pair.treatment - pair.control;
  const double radius = std::sqrt(bound * pair.variance());
  comparison.basis = Basis::kAsymptotic;
  comparison.variance = pair.variance();
  comparison.tau_squared = tau_squared;
  comparison.interval = {.lower = difference - radius, .upper = difference + radius};
  comparison.p_value = MixturePValue(difference * difference / pair.variance(), spread);
  comparison.lift = FiellerLift(pair, bound);
}

Interval AsymptoticInterval(const MetricEstimates& estimates, size_t arm, double alpha) {
  const ArmEstimate& observed = estimates.arms[arm];
  const double variance = std::max(estimates.Covariance(arm, arm), kRounding * observed.variance);
  const double tau_squared = kDefaultTau * kDefaultTau * observed.value_variance;
  const double radius = std::sqrt(variance * MixtureBound(tau_squared / variance, alpha));
  return {.lower = estimates.Mean(arm) - radius, .upper = estimates.Mean(arm) + radius};
}

}  // namespace

double AlphaPerArm(double alpha, int num_arms) {
  Require(num_arms >= 2, "nothing to compare");
  return alpha / (num_arms - 1);
}

SubgroupAlphas AlphaPerSubgroup(double alpha, const SubgroupCounts& counts) {
  Require(counts.divisions >= 1 && counts.classes >= 2, "no subgroups");
  const double per_arm = AlphaPerArm(alpha, counts.arms);
  return {.interval = per_arm / counts.classes, .heterogeneity = per_arm / counts.divisions};
}

bool Lift::Holds(double lift) const {
  switch (set) {
    case Set::kInterval:
      return interval.Holds(lift);
    case Set::kTwoRays:
      return lift <= interval.lower || lift >= interval.upper;
    case Set::kAll:
      break;
  }
  return true;
}

bool CovariateDiffers(const MetricSums& sums) {
  std::vector<Estimated> means, shares;
  double units = 0, covered = 0;
  for (const ArmSums& arm : sums.arms) {
    if (arm.units < static_cast<double>(kLeastUnits)) return false;
    if (arm.covered >= static_cast<double>(kLeastUnits)) {
      means.push_back({.value = arm.x / arm.covered, .variance = 1 / arm.covered});
    }
    shares.push_back({.value = arm.covered / arm.units, .variance = 1 / arm.units});
    units += arm.units;
    covered += arm.covered;
  }
  const double share = covered / units;
  return ArmsDiffer(means, CovariateVariance(sums)) || ArmsDiffer(shares, share * (1 - share));
}

ArmReading ReadArm(const MetricSums& sums, size_t arm, const AnalysisOptions& options) {
  Require(arm < sums.arms.size(), "no such arm");
  const MetricEstimates estimates = EstimateSoundly(sums);
  ArmReading reading{.observed = estimates.arms[arm]};
  if (!reading.observed.mean.has_value()) return reading;
  reading.mean = estimates.Mean(arm);
  const bool is_asymptotic =
      HasUnits(reading.observed) && reading.observed.effective_units >= kLeastEffectiveUnitsAlone;
  const bool is_clustered =
      reading.observed.observations > static_cast<double>(reading.observed.units);
  if (HasExactSequence(reading.observed, options) && !(is_clustered && is_asymptotic)) {
    const Trials trials = IndependentTrials(reading.observed);
    reading.basis = Basis::kExact;
    reading.mean = reading.observed.mean;
    reading.interval = ProportionSequence(trials.ones, trials.trials, options.alpha);
  } else if (is_asymptotic) {
    reading.basis = Basis::kAsymptotic;
    reading.interval = AsymptoticInterval(estimates, arm, options.alpha);
  }
  return reading;
}

Comparison Compare(const MetricSums& sums, size_t control, size_t treatment,
                   const AnalysisOptions& options) {
  Require(control < sums.arms.size() && treatment < sums.arms.size(), "no such arm");
  Require(control != treatment, "an arm is not compared with itself");
  const MetricEstimates estimates = EstimateSoundly(sums);
  Comparison comparison{.control = estimates.arms[control], .treatment = estimates.arms[treatment]};
  if (!comparison.control.mean.has_value() || !comparison.treatment.mean.has_value()) {
    return comparison;
  }
  const Pair pair = PairOf(estimates, control, treatment);
  comparison.difference = pair.treatment - pair.control;
  comparison.lift.estimate = LiftOf(pair.control, pair.treatment);
  if (IsAsymptotic(comparison.control, comparison.treatment, options.kind)) {
    CompareAsymptotically(pair, options, comparison);
    comparison.variance_saved = VarianceSaved(estimates, control, treatment);
  } else if (HasExactSequence(comparison.control, options) &&
             HasExactSequence(comparison.treatment, options)) {
    CompareExactly(options, comparison);
  }
  return comparison;
}

double AlphaPerPairedMetric(double alpha) { return alpha / 2; }

Comparison ComparePairs(const MetricSums& differences, double alpha) {
  Require(differences.arms.size() == 1, "differences are of one arm");
  const ArmEstimate found = Estimate(differences).arms.front();
  Comparison comparison{.treatment = found, .difference = found.mean};
  if (!HasUnits(found) || !HasEffectiveUnits(found)) return comparison;
  const double tau_squared = kPairTau * kPairTau * found.value_variance;
  const double spread = tau_squared / found.variance;
  const double radius = std::sqrt(MixtureBound(spread, alpha) * found.variance);
  comparison.basis = Basis::kAsymptotic;
  comparison.variance = found.variance;
  comparison.tau_squared = tau_squared;
  comparison.interval = {.lower = *found.mean - radius, .upper = *found.mean + radius};
  comparison.p_value = MixturePValue(*found.mean * *found.mean / found.variance, spread);
  return comparison;
}

Heterogeneity CompareSubgroups(absl::Span<const Comparison> subgroups, double tau_squared) {
  if (tau_squared == 0) return {};
  std::vector<Estimated> differences;
  for (const Comparison& subgroup : subgroups) {
    if (subgroup.basis != Basis::kAsymptotic || subgroup.variance <= 0) continue;
    differences.push_back({.value = *subgroup.difference, .variance = subgroup.variance});
  }
  Heterogeneity found{.num_compared = static_cast<int>(differences.size())};
  if (found.num_compared >= 2) found.p_value = SamenessPValue(differences, tau_squared);
  return found;
}

Verdict JudgeGuardrail(const Comparison& comparison, Better better, double margin) {
  Require(margin >= 0, "a margin is a size");
  if (comparison.basis == Basis::kTooEarly) return Verdict::kTooEarly;
  const Interval& gain = comparison.interval;
  const Interval loss =
      better == Better::kLower ? gain : Interval{.lower = -gain.upper, .upper = -gain.lower};
  if (loss.lower > margin) return Verdict::kBreached;
  if (loss.upper <= margin) return Verdict::kSafe;
  return Verdict::kUndecided;
}

}  // namespace epikv
