#include "server/experiments/figures/confidence_sequence.h"

#include <algorithm>
#include <boost/math/special_functions/gamma.hpp>
#include <boost/math/special_functions/lambert_w.hpp>
#include <boost/math/tools/roots.hpp>
#include <cmath>
#include <cstdint>
#include <utility>

#include "runtime/base/require.h"

namespace epikv {
namespace {

constexpr double kJeffreys = .5;                           // both parameters of the prior
constexpr double kLogBetaOfJeffreys = 1.1447298858494002;  // B(1/2, 1/2) = pi

double LogBeta(double a, double b) {
  return boost::math::lgamma(a) + boost::math::lgamma(b) - boost::math::lgamma(a + b);
}

// How estimates whose variances are all greater by `more` scatter.
struct Scatter {
  double cochran_q = 0;
  double log_determinant = 0;  // of the variances of their differences, but for a constant
};

Scatter ScatterOf(absl::Span<const Estimated> estimates, double more) {
  Scatter scatter;
  double weights = 0, mean = 0;
  for (const Estimated& estimate : estimates) {
    const double weight = 1 / (estimate.variance + more);
    weights += weight;
    mean += weight * (estimate.value - mean) / weights;
    scatter.log_determinant -= std::log(weight);
  }
  scatter.log_determinant += std::log(weights);
  for (const Estimated& estimate : estimates) {
    const double away = estimate.value - mean;
    scatter.cochran_q += away * away / (estimate.variance + more);
  }
  return scatter;
}

// count * log(share), where nothing of nothing is nothing.
double LogPower(double share, double count) { return count > 0 ? count * std::log(share) : 0; }

// Where the evidence passes `threshold` between the observed share, at which it is less, and an end
// of [0, 1], at which it is more: a bracket of it.
std::pair<double, double> Crossing(const ProportionEvidence& evidence, double threshold, double low,
                                   double high) {
  const auto excess = [&](double share) {
    // Of an impossible share as much as a root finder can bear.
    return std::min(evidence.Against(share) - threshold, 1e300);
  };
  std::uintmax_t iterations = 200;
  return boost::math::tools::toms748_solve(
      excess, low, high, boost::math::tools::eps_tolerance<double>(40), iterations);
}

}  // namespace

double MixtureBound(double spread, double alpha) {
  Require(spread > 0 && alpha > 0 && alpha < 1, "no mixture");
  return (1 + 1 / spread) * (std::log1p(spread) - 2 * std::log(alpha));
}

double MixturePValue(double squared_errors, double spread) {
  Require(spread > 0, "no mixture");
  const double evidence = squared_errors / (1 + 1 / spread) - std::log1p(spread);
  return std::min(1., std::exp(-evidence / 2));
}

// The derivative of MixtureBound is 0 where spread - log(1 + spread) = -2 log(alpha).
double TightestSpread(double alpha) {
  Require(alpha > 0 && alpha < 1, "alpha is a chance");
  return -boost::math::lambert_wm1(-alpha * alpha * std::exp(-1.)) - 1;
}

double SamenessPValue(absl::Span<const Estimated> estimates, double tau_squared) {
  Require(tau_squared > 0, "no mixture");
  if (estimates.size() < 2) return 1;
  const Scatter seen = ScatterOf(estimates, 0), mixed = ScatterOf(estimates, tau_squared);
  const double evidence =
      seen.cochran_q - mixed.cochran_q + seen.log_determinant - mixed.log_determinant;
  return std::min(1., std::exp(-evidence / 2));
}

ProportionEvidence::ProportionEvidence(double ones, double trials)
    : ones_(ones), zeros_(trials - ones) {
  Require(ones_ >= 0 && zeros_ >= 0, "more ones than trials");
  mixture_ = LogBeta(kJeffreys + ones_, kJeffreys + zeros_) - kLogBetaOfJeffreys;
}

double ProportionEvidence::Against(double share) const {
  return mixture_ - LogPower(share, ones_) - LogPower(1 - share, zeros_);
}

Interval ProportionSequence(double ones, double trials, double alpha) {
  const ProportionEvidence evidence(ones, trials);
  Interval interval{.lower = 0, .upper = 1};
  if (trials <= 0) return interval;
  const double threshold = -std::log(alpha);
  const double observed = ones / trials;
  if (ones > 0) interval.lower = Crossing(evidence, threshold, 0, observed).first;
  if (ones < trials) interval.upper = Crossing(evidence, threshold, observed, 1).second;
  return interval;
}

}  // namespace epikv
