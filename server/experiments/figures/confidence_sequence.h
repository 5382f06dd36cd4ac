#pragma once

#include <limits>

#include "absl/types/span.h"

// Intervals and p-values that hold at all looks together: with a chance of 1 - alpha the interval
// holds the truth at every look, however many there are and whoever decides when to stop. alpha is
// in (0, 1) everywhere.

namespace epikv {

// In the units of what it is about. Unbounded on a side of which nothing is known.
struct Interval {
  double lower = -std::numeric_limits<double>::infinity();
  double upper = std::numeric_limits<double>::infinity();

  bool Holds(double value) const { return lower <= value && value <= upper; }
};

// Of an estimate that is about normal with this variance, which shrinks from look to look: how many
// standard errors, squared, the truth may be away. spread: tau^2 / variance at this look, where
// tau, in the estimate's units, is the same at all looks. The normal mixture of Robbins (1970), as
// an asymptotic confidence sequence: Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas 2021,
// "Time-uniform central limit theory and asymptotic confidence sequences", theorem 2.2, with rho^2
// = tau^2 / (variance of a single observation). Precondition: spread > 0.
double MixtureBound(double spread, double alpha);

// The least alpha at which 0 is left out by MixtureBound, if the estimate is so many standard
// errors, squared, away from it: Johari, Koomen, Pekelis, Walsh 2022, "Always valid inference",
// section 4. At most 1. Precondition: spread > 0.
double MixturePValue(double squared_errors, double spread);

// The spread at which MixtureBound * variance is least: tau is to be
// sqrt(TightestSpread(alpha) * variance) for the sequence to be tightest when the estimate has this
// variance. Waudby-Smith et al. 2021, appendix on the choice of rho.
double TightestSpread(double alpha);

// An estimate of its own data, about normal with this variance, > 0.
struct Estimated {
  double value = 0, variance = 0;
};

// Of several independent estimates: the least alpha at which it is left out that they are all of
// one value, whatever it is. Always valid, at most 1; 1 for fewer than two. The normal mixture of
// MixturePValue over all directions in which they may differ, each with tau^2: with Cochran's Q(v)
// = sum (value - mean)^2 / v about the mean weighed by 1 / v, the evidence is (Q(variance) -
// Q(variance + tau^2)) / 2, less half of the logarithm of a ratio of determinants. tau as of
// MixtureBound. Precondition: tau_squared > 0.
double SamenessPValue(absl::Span<const Estimated> estimates, double tau_squared);

// Of the share of ones among independent trials of 0 or 1, or of values between: exact at every
// number of trials. The mixture of binomials over Jeffreys' prior: Robbins 1970, "Statistical
// methods related to the law of the iterated logarithm", section 2; Howard, Ramdas, McAuliffe,
// Sekhon 2021, proposition 7. Precondition: 0 <= ones <= trials; need not be whole.
Interval ProportionSequence(double ones, double trials, double alpha);

// How much better the mixture of ProportionSequence foretold some trials than one share of ones
// did: the logarithm of their likelihoods' ratio, which the sequence compares with 1 / alpha.
class ProportionEvidence {
 public:
  // Precondition: 0 <= ones <= trials.
  ProportionEvidence(double ones, double trials);

  // Infinite where such trials cannot be. share: in [0, 1].
  double Against(double share) const;

 private:
  double ones_, zeros_, mixture_;
};

}  // namespace epikv
