#include "server/experiments/figures/metric_tally.h"

#include <algorithm>
#include <cmath>

#include "runtime/base/require.h"

namespace epikv {
namespace {

// Its fourth power, times many units, is a double.
constexpr double kGreatest = 1e50;
// Of sums of squares, less than rounding leaves.
constexpr double kSquaresRounding = 1e-11;

double SquareOf(double x) { return x * x; }

// The sum of squares of what is left of a sum of squares of this size: nothing, or more than the
// rounding of it.
double Left(double squares, double of) { return squares > kSquaresRounding * of ? squares : 0; }

struct CovariateSums {
  double mean = 0;      // over all units
  double squares = 0;   // about the arm's mean
  double products = 0;  // with the linearised values
};

// centre: from the covariate's origin. ratio: the arm's mean, from the values' origin.
CovariateSums CentredCovariate(const ArmSums& arm, double centre, double ratio) {
  CovariateSums sums;
  const double total = arm.x - centre * arm.covered;
  sums.mean = total / arm.units;
  const double squares = arm.xx - 2 * centre * arm.x + centre * centre * arm.covered;
  sums.squares = Left(squares - total * sums.mean, arm.xx + centre * centre * arm.covered);
  sums.products = (arm.xs - centre * arm.covered_s) - ratio * (arm.xn - centre * arm.covered_n);
  return sums;
}

ArmEstimate EstimateArm(const MetricSums& sums, const ArmSums& arm, double centre) {
  ArmEstimate estimate{.units = std::llround(arm.units), .observations = arm.n};
  if (arm.units < 1) return estimate;
  const double ratio = arm.s / arm.n;
  estimate.mean = sums.value_origin + ratio;
  estimate.covariate_units = std::llround(arm.covered);
  estimate.spread_units = arm.n * arm.n / arm.nn;
  if (arm.units < 2) return estimate;
  const double freedom = arm.units / (arm.units - 1);
  const double r2 = ratio * ratio;
  const double squares = Left(arm.ss - 2 * ratio * arm.sn + r2 * arm.nn, arm.ss + r2 * arm.nn);
  const double fourths = arm.ssss - 4 * ratio * arm.sssn + 6 * r2 * arm.ssnn -
                         4 * ratio * r2 * arm.snnn + r2 * r2 * arm.nnnn;
  estimate.variance = freedom * squares / (arm.n * arm.n);
  estimate.value_variance = Left(arm.squares - r2 * arm.n, arm.squares) / arm.n;
  if (squares > 0 && estimate.value_variance > 0) {
    // Of no sum of so many squares is the fourth power less.
    const double least = squares * squares / arm.units;
    estimate.effective_units =
        std::min(squares * squares / std::max(fourths, least), estimate.spread_units);
  }
  const CovariateSums covariate = CentredCovariate(arm, centre, ratio);
  estimate.covariate_mean = covariate.mean;
  estimate.covariate_variance = freedom * covariate.squares / SquareOf(arm.units);
  estimate.covariance = freedom * covariate.products / (arm.n * arm.units);
  return estimate;
}

}  // namespace

ArmSums& ArmSums::operator+=(const ArmSums& other) {
  units += other.units;
  s += other.s;
  n += other.n;
  ss += other.ss;
  sn += other.sn;
  nn += other.nn;
  ssss += other.ssss;
  sssn += other.sssn;
  ssnn += other.ssnn;
  snnn += other.snnn;
  nnnn += other.nnnn;
  squares += other.squares;
  covered += other.covered;
  covered_s += other.covered_s;
  covered_n += other.covered_n;
  x += other.x;
  xx += other.xx;
  xs += other.xs;
  xn += other.xn;
  return *this;
}

ArmSums& ArmSums::operator-=(const ArmSums& other) {
  units -= other.units;
  s -= other.s;
  n -= other.n;
  ss -= other.ss;
  sn -= other.sn;
  nn -= other.nn;
  ssss -= other.ssss;
  sssn -= other.sssn;
  ssnn -= other.ssnn;
  snnn -= other.snnn;
  nnnn -= other.nnnn;
  squares -= other.squares;
  covered -= other.covered;
  covered_s -= other.covered_s;
  covered_n -= other.covered_n;
  x -= other.x;
  xx -= other.xx;
  xs -= other.xs;
  xn -= other.xn;
  return *this;
}

// But for `squares`, which are not the unit's.
ArmSums MetricTally::SumsOf(const Unit& unit) {
  const double s = unit.s, n = unit.n;
  ArmSums sums{.units = 1,
               .s = s,
               .n = n,
               .ss = s * s,
               .sn = s * n,
               .nn = n * n,
               .ssss = s * s * s * s,
               .sssn = s * s * s * n,
               .ssnn = s * s * n * n,
               .snnn = s * n * n * n,
               .nnnn = n * n * n * n};
  if (!unit.x.has_value()) return sums;
  const double x = *unit.x;
  sums.covered = 1;
  sums.covered_s = s;
  sums.covered_n = n;
  sums.x = x;
  sums.xx = x * x;
  sums.xs = x * s;
  sums.xn = x * n;
  return sums;
}

MetricTally::Added MetricTally::Add(size_t arm, uint64_t unit, double value,
                                    std::optional<double> covariate) {
  Require(arm < sums_.arms.size(), "no such arm");
  // Also where one is no number.
  if (!(std::abs(value) <= kGreatest)) return Added::kOutOfRange;
  if (covariate.has_value() && !(std::abs(*covariate) <= kGreatest)) return Added::kOutOfRange;
  const auto [found, is_new] = units_.try_emplace(unit, Unit{.arm = arm});
  Unit& known = found->second;
  if (known.arm != arm) return Added::kOtherArm;
  if (!has_value_) sums_.value_origin = value;
  has_value_ = true;
  ArmSums& sums = sums_.arms[arm];
  if (!is_new) {
    sums -= SumsOf(known);
  } else if (covariate.has_value()) {
    if (!has_covariate_) sums_.covariate_origin = *covariate;
    has_covariate_ = true;
    known.x = *covariate - sums_.covariate_origin;
  }
  const double centred = value - sums_.value_origin;
  known.s += centred;
  known.n += 1;
  sums += SumsOf(known);
  sums.squares += centred * centred;
  return Added::kCounted;
}

MetricEstimates Estimate(const MetricSums& sums) {
  ArmSums all;
  for (const ArmSums& arm : sums.arms) all += arm;
  const double centre = all.covered > 0 ? all.x / all.covered : 0;
  MetricEstimates estimates;
  double products = 0, squares = 0;
  for (const ArmSums& arm : sums.arms) {
    const ArmEstimate& estimate = estimates.arms.emplace_back(EstimateArm(sums, arm, centre));
    products += estimate.covariance;
    squares += estimate.covariate_variance;
  }
  if (squares > 0) estimates.coefficient = products / squares;
  return estimates;
}

double MetricEstimates::Mean(size_t arm) const {
  return arms[arm].mean.value() - coefficient * arms[arm].covariate_mean;
}

// Mean(a) is, to first order, the arm's own mean - coefficient * (its covariate's mean - that of
// all units), in which the arms themselves are independent.
double MetricEstimates::Covariance(size_t a, size_t b) const {
  double units = 0;
  for (const ArmEstimate& arm : arms) units += static_cast<double>(arm.units);
  double sum = a == b ? arms[a].variance : 0;
  for (size_t arm = 0; arm < arms.size(); ++arm) {
    const double weight = static_cast<double>(arms[arm].units) / units;
    const double in_a = (arm == a) - weight, in_b = (arm == b) - weight;
    sum -= coefficient * ((arm == a) * in_b + (arm == b) * in_a) * arms[arm].covariance;
    sum += coefficient * coefficient * in_a * in_b * arms[arm].covariate_variance;
  }
  return sum;
}

}  // namespace epikv
