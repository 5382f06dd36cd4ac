#pragma once

#include <cstdint>

#include "absl/types/span.h"

namespace epikv {

// Below this the split of units is not what was asked for, and no figure of the experiment is to be
// trusted until it is explained (Fabijan et al. 2019, "Diagnosing sample ratio mismatch").
inline constexpr double kSampleRatioAlarm = .001;

// Whether arms have got the units that their weights promised them.
struct SampleRatio {
  double statistic = 0;  // Pearson's chi-squared; infinite if an arm without weight has units
  // Of one look: somebody who looks often sees an alarm more often than one time in a thousand.
  double p_value = 1;

  bool alarm() const { return p_value < kSampleRatioAlarm; }
};

// units: seen in each arm, >= 0. weights: one each, >= 0, at least one of them positive, of any
// sum. Pearson's test of goodness of fit, arms - 1 degrees of freedom. Where an arm expects fewer
// than 50 units chi-squared is wrong so far out in its tail: there each arm's units are compared
// with the binomial distribution that they then have, and the least p is taken times the number of
// arms (Bonferroni; of two arms the tests are one, and exact).
SampleRatio CheckSampleRatio(absl::Span<const int64_t> units, absl::Span<const double> weights);

// Whether what was dealt to arms was lost from each of them alike. settled: of each arm, what is
// lost or kept, >= lost >= 0. CheckSampleRatio of the rarer fate, with what is settled as weights:
// exact as that fate becomes rare, and careful where it is not (at a half of all, p is of a
// statistic that is half as large).
SampleRatio CheckLosses(absl::Span<const int64_t> lost, absl::Span<const int64_t> settled);

}  // namespace epikv
