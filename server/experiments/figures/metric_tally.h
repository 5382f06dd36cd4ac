#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"

// What is kept of a metric's observations, and what follows from it about the mean of each arm.
//
// Units are dealt to arms, and a unit may have many observations that resemble one another. An
// arm's mean is that of its observations, a ratio of two sums over units, and its variance that of
// the linearised ratio, by unit ("delta method": Deng, Knoblich, Lu 2018, "Applying the delta
// method in metric analytics", section 4; the same as the cluster-robust variance of a regression
// on the arm).

namespace epikv {

// Of a unit's own sums, added over the units of an arm. Values and covariates are counted from
// MetricSums' origins, so that large ones that differ little lose nothing.
struct ArmSums {
  double units = 0;
  // Per unit: s is the sum of its values, n the number of its observations, x its covariate.
  double s = 0, n = 0;
  double ss = 0, sn = 0, nn = 0;
  double ssss = 0, sssn = 0, ssnn = 0, snnn = 0, nnnn = 0;
  double squares = 0;  // of single values
  // Of units that have a covariate alone.
  double covered = 0;  // how many these are
  double covered_s = 0, covered_n = 0;
  double x = 0, xx = 0, xs = 0, xn = 0;

  ArmSums& operator+=(const ArmSums& other);
  ArmSums& operator-=(const ArmSums& other);
};

struct MetricSums {
  double value_origin = 0, covariate_origin = 0;  // in the metric's and the covariate's own units
  std::vector<ArmSums> arms;
};

// Observations of one metric, a unit's in the order of time; adding takes O(1), reading O(arms).
// One thread at a time.
class MetricTally {
 public:
  explicit MetricTally(size_t num_arms) { sums_.arms.resize(num_arms); }

  enum class Added {
    kCounted,
    kOtherArm,    // the unit has been seen in another arm: not counted
    kOutOfRange,  // the value or the covariate is no number or beyond 1e50: not counted
  };
  // unit: a hash of it, 64 bits of which tell units apart. covariate: something that was known
  // before the unit's first observation. That of its first observation is the unit's, and all
  // others are ignored: by then the arm may have had a hand in them (a prompt holds the answers
  // before it). Precondition: arm < num_arms.
  Added Add(size_t arm, uint64_t unit, double value,
            std::optional<double> covariate = std::nullopt);

  const MetricSums& sums() const { return sums_; }

 private:
  struct Unit {
    size_t arm = 0;
    double s = 0, n = 0;
    std::optional<double> x;
  };
  static ArmSums SumsOf(const Unit& unit);

  MetricSums sums_;
  bool has_value_ = false, has_covariate_ = false;
  absl::flat_hash_map<uint64_t, Unit> units_;
};

// One arm, as it was observed.
struct ArmEstimate {
  int64_t units = 0;
  double observations = 0;
  std::optional<double> mean;  // of observations, in the metric's units; absent without any
  double variance = 0;         // of the mean, between units
  double value_variance = 0;   // of single observations within the arm

  // How many units, alike and with one observation each, would say as much about the variance: the
  // lesser of units / kurtosis of the linearised values (of 0 and 1, about the number of the rarer)
  // and of units as far as observations are spread over them (Kish).
  double effective_units = 0;
  double spread_units = 0;  // the latter

  int64_t covariate_units = 0;  // whose covariate is known
  double covariate_mean = 0;    // over units, from the mean of all arms; units without it are at 0
  double covariate_variance = 0;
  double covariance = 0;  // of mean and covariate_mean
};

// All arms, adjusted by the covariate (CUPED: Deng, Xu, Kohavi, Walker 2013, section 3; here of a
// ratio, as in Deng, Knoblich, Lu 2018): mean - coefficient * covariate_mean. Arms differ in the
// covariate by chance alone, so that this takes variance out and adds no bias, for units are
// weighed alike and had their covariate before their arm. Units without one count as having the
// mean of those that do: they take no part in the adjustment.
struct MetricEstimates {
  std::vector<ArmEstimate> arms;
  // The one that makes the sum of the arms' variances least, the variance of a difference of two
  // equal arms among it. 0: there is no covariate, or it is the same for all units.
  double coefficient = 0;

  // Precondition: the arm has observations.
  double Mean(size_t arm) const;
  // Of two adjusted means; of an arm and itself, its variance. They are not independent, for what
  // is the covariate's mean is estimated from all arms.
  double Covariance(size_t a, size_t b) const;
};

MetricEstimates Estimate(const MetricSums& sums);

}  // namespace epikv
