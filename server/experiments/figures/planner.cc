#include "server/experiments/figures/planner.h"

#include <algorithm>
#include <boost/math/distributions/chi_squared.hpp>
#include <boost/math/distributions/non_central_chi_squared.hpp>
#include <boost/math/tools/roots.hpp>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/experiments/figures/sample_ratio.h"

namespace epikv {
namespace {

constexpr double kNoBound = std::numeric_limits<double>::infinity();
constexpr double kMostUnits = 1e12;
constexpr int kMostLooks = 200;
constexpr double kPrecision = 1e-3;  // of units and effects, relative
constexpr double kTail = 8.5;        // standard deviations: beyond is nothing

double Density(double x, double sd) {
  constexpr double kOneOverRootTwoPi = 0.3989422804014327;
  const double z = x / sd;
  return kOneOverRootTwoPi / sd * std::exp(-z * z / 2);
}

// Points with Simpson's weights, and at each the density of paths that have not left.
struct Grid {
  double low = 0, step = 0;
  std::vector<double> density;

  double point(size_t i) const { return low + step * static_cast<double>(i); }
  double weight(size_t i) const {
    const bool is_end = i == 0 || i + 1 == density.size();
    return step / 3 * (is_end ? 1 : i % 2 == 1 ? 4 : 2);
  }
};

// Of [low, high]; steps are at most an eighth of `sd`.
Grid GridOf(double low, double high, double sd) {
  const double intervals = 2 * std::ceil((high - low) / (sd / 8) / 2);
  Grid grid{.low = low, .step = (high - low) / intervals};
  grid.density.resize(static_cast<size_t>(intervals) + 1);
  return grid;
}

// Normal, on the grid's points.
void Begin(double mean, double sd, Grid& grid) {
  for (size_t i = 0; i < grid.density.size(); ++i) {
    grid.density[i] = Density(grid.point(i) - mean, sd);
  }
}

// `from`, one normal increment later, on `to`'s points.
void Advance(const Grid& from, double mean, double sd, Grid& to) {
  for (size_t j = 0; j < to.density.size(); ++j) {
    const double centre = to.point(j) - mean;
    const double first = std::ceil((centre - kTail * sd - from.low) / from.step);
    const double last = std::floor((centre + kTail * sd - from.low) / from.step);
    const double end = static_cast<double>(from.density.size()) - 1;
    double sum = 0;
    for (double i = std::max(0., first); i <= std::min(end, last); ++i) {
      const size_t at = static_cast<size_t>(i);
      sum += from.weight(at) * from.density[at] * Density(centre - from.point(at), sd);
    }
    to.density[j] = sum;
  }
}

double Integral(const Grid& grid) {
  double sum = 0;
  for (size_t i = 0; i < grid.density.size(); ++i) sum += grid.weight(i) * grid.density[i];
  return sum;
}

// Of a mean, whose distribution is not known: by a normal one's kurtosis.
constexpr double kNormalEffectiveShare = 1. / 3;

// One arm as the plan expects it.
struct ExpectedArm {
  double units = 0;
  double share = 0;            // of all units
  double variance = 0;         // of a unit
  double effective_share = 1;  // effective units by unit
};

// units p q / (1 - 3 p q): units by kurtosis.
ExpectedArm ProportionArm(double units, double share, double rate) {
  const double variance = rate * (1 - rate);
  return {.units = units * share,
          .share = share,
          .variance = variance,
          .effective_share = std::min(1., variance / (1 - 3 * variance))};
}

struct ExpectedArms {
  ExpectedArm control, treatment;
};

ExpectedArms Expect(const Baseline& baseline, double effect, double units, const Design& design) {
  if (baseline.kind == MetricKind::kProportion) {
    return {.control = ProportionArm(units, design.control_share, baseline.rate),
            .treatment = ProportionArm(units, design.treatment_share, baseline.rate + effect)};
  }
  ExpectedArm arm{.variance = baseline.sd * baseline.sd, .effective_share = kNormalEffectiveShare};
  const auto with = [&](double share) {
    arm.units = units * share;
    arm.share = share;
    return arm;
  };
  return {.control = with(design.control_share), .treatment = with(design.treatment_share)};
}

// At a look at this share of the units. Units are dealt by chance, and ones come by chance: an arm
// may have as many fewer than expected as two standard deviations, of a binomial and of a Poisson
// number.
bool IsTooEarly(const ExpectedArm& arm, double share) {
  const double units = arm.units * share, effective = units * arm.effective_share;
  return units - 2 * std::sqrt(units * (1 - arm.share)) < kLeastUnits ||
         effective - 2 * std::sqrt(effective) < kLeastEffectiveUnits;
}

// A bound for each look, infinite where it is too early. variance: of the estimate at the last
// look.
std::vector<double> BoundsOf(const Design& design, double variance, double tau_squared,
                             absl::Span<const ExpectedArm> arms) {
  std::vector<double> bounds(design.looks);
  for (int look = 0; look < design.looks; ++look) {
    const double share = (look + 1.) / design.looks;
    const bool is_early = std::any_of(arms.begin(), arms.end(), [share](const ExpectedArm& arm) {
      return IsTooEarly(arm, share);
    });
    bounds[look] =
        is_early ? kNoBound : std::sqrt(MixtureBound(tau_squared * share / variance, design.alpha));
  }
  return bounds;
}

UnitPlan PowerOfPairs(double sd, double effect, double units, const Design& design) {
  const double variance = sd * sd / units, tau = kPairTau * sd;
  const ExpectedArm all{
      .units = units, .share = 1, .variance = sd * sd, .effective_share = kNormalEffectiveShare};
  return {.units = static_cast<int64_t>(units),
          .power = CrossingProbability(BoundsOf(design, variance, tau * tau, {all}),
                                       effect / std::sqrt(variance)),
          .tau = tau};
}

UnitPlan PowerOf(const Baseline& baseline, double effect, double units, const Design& design) {
  if (design.paired) return PowerOfPairs(baseline.sd, effect, units, design);
  const auto [control, treatment] = Expect(baseline, effect, units, design);
  const double value_variance =
      (control.units * control.variance + treatment.units * treatment.variance) /
      (control.units + treatment.units);
  const double variance = (1 - design.covariate_r2) *
                          (control.variance / control.units + treatment.variance / treatment.units);
  const double tau_squared = design.tuning == Tuning::kLastLook
                                 ? TightestSpread(design.alpha) * variance
                                 : kDefaultTau * kDefaultTau * value_variance;
  return {
      .units = static_cast<int64_t>(units),
      .power = CrossingProbability(BoundsOf(design, variance, tau_squared, {control, treatment}),
                                   effect / std::sqrt(variance)),
      .tau = std::sqrt(tau_squared)};
}

absl::Status OutOf(absl::string_view name, absl::string_view range, double value) {
  return absl::InvalidArgumentError(absl::StrCat(name, " must be in ", range, ", is ", value));
}

absl::Status Check(const Baseline& baseline, const Design& design) {
  if (!(design.alpha > 0 && design.alpha < 1)) return OutOf("alpha", "(0, 1)", design.alpha);
  if (!(design.power > design.alpha && design.power < 1)) {
    return OutOf("power", "(alpha, 1)", design.power);
  }
  if (design.looks < 1 || design.looks > kMostLooks) {
    return OutOf("the number of looks", absl::StrCat("[1, ", kMostLooks, "]"), design.looks);
  }
  if (!(design.covariate_r2 >= 0 && design.covariate_r2 < 1)) {
    return OutOf("the covariate's R^2", "[0, 1)", design.covariate_r2);
  }
  if (!(design.control_share > 0 && design.treatment_share > 0 &&
        design.control_share + design.treatment_share <= 1 + 1e-9)) {
    return absl::InvalidArgumentError(
        absl::StrCat("shares of units must be positive and sum to at most 1, are ",
                     design.control_share, " and ", design.treatment_share));
  }
  if (design.paired && baseline.kind != MetricKind::kMean) {
    return absl::InvalidArgumentError(
        "pairs are planned by the standard deviation of their differences, not by a rate");
  }
  if (baseline.kind == MetricKind::kMean) {
    // Beyond, its square is 0 or infinite.
    if (!(baseline.sd >= 1e-100 && baseline.sd <= 1e100)) {
      return OutOf("the standard deviation", "[1e-100, 1e100]", baseline.sd);
    }
  } else if (!(baseline.rate >= 1e-100 && baseline.rate < 1)) {
    return OutOf("the rate", "[1e-100, 1)", baseline.rate);
  }
  return absl::OkStatus();
}

absl::Status CheckEffect(const Baseline& baseline, double effect) {
  if (!std::isfinite(effect) || effect == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the effect must be a finite number other than 0, is ", effect));
  }
  const double rate = baseline.rate + effect;
  if (baseline.kind == MetricKind::kProportion && !(rate > 0 && rate < 1)) {
    return OutOf("the rate with the effect", "(0, 1)", rate);
  }
  return absl::OkStatus();
}

// The least x in (low, high], to kPrecision, at which `is_enough` holds, which holds from there on.
// Precondition: 0 < low; it holds at high.
template <typename Predicate>
double Least(double low, double high, Predicate is_enough) {
  while (high / low > 1 + kPrecision) {
    const double middle = low * std::sqrt(high / low);
    (is_enough(middle) ? high : low) = middle;
  }
  return high;
}

// The least effect in one direction.
std::optional<double> LeastEffect(const Baseline& baseline, double units, double sign,
                                  const Design& design) {
  const auto is_enough = [&](double size) {
    return PowerOf(baseline, sign * size, units, design).power >= design.power;
  };
  if (baseline.kind == MetricKind::kMean) {
    const double se = baseline.sd / std::sqrt(units * design.control_share) +
                      baseline.sd / std::sqrt(units * design.treatment_share);
    const double most = 100 * se;  // no bound is so far away
    return is_enough(most) ? std::optional(sign * Least(1e-6 * se, most, is_enough)) : std::nullopt;
  }
  const double room = sign > 0 ? 1 - baseline.rate : baseline.rate;
  // The power rises with the effect, until too few zeros or ones are left to be seen.
  constexpr int kSteps = 60;
  double below = 1e-9 * room;
  for (int step = 1; step < kSteps; ++step) {
    const double size = room * std::pow(1e-6, 1 - static_cast<double>(step) / kSteps);
    if (is_enough(size)) return sign * Least(below, size, is_enough);
    below = size;
  }
  return std::nullopt;
}

}  // namespace

double CrossingProbability(absl::Span<const double> bounds, double drift) {
  const double looks = static_cast<double>(bounds.size());
  const double mean = drift / looks, sd = std::sqrt(1 / looks);
  std::optional<Grid> grid;
  for (size_t look = 0; look < bounds.size(); ++look) {
    if (!grid.has_value() && std::isinf(bounds[look])) continue;
    const double time = (static_cast<double>(look) + 1) / looks, root = std::sqrt(time);
    const double low = std::max(-bounds[look] * root, drift * time - kTail * root);
    const double high = std::min(bounds[look] * root, drift * time + kTail * root);
    if (low >= high) return 1;
    Grid next = GridOf(low, high, sd);
    if (grid.has_value()) {
      Advance(*grid, mean, sd, next);
    } else {
      Begin(drift * time, root, next);
    }
    grid = std::move(next);
  }
  return grid.has_value() ? std::clamp(1 - Integral(*grid), 0., 1.) : 0;
}

absl::StatusOr<UnitPlan> PlanPower(const Baseline& baseline, double effect, int64_t units,
                                   const Design& design) {
  if (absl::Status status = Check(baseline, design); !status.ok()) return status;
  if (absl::Status status = CheckEffect(baseline, effect); !status.ok()) return status;
  if (units < 1) return OutOf("the number of units", "[1, infinity)", static_cast<double>(units));
  return PowerOf(baseline, effect, static_cast<double>(units), design);
}

absl::StatusOr<UnitPlan> PlanUnits(const Baseline& baseline, double effect, const Design& design) {
  if (absl::Status status = Check(baseline, design); !status.ok()) return status;
  if (absl::Status status = CheckEffect(baseline, effect); !status.ok()) return status;
  const auto is_enough = [&](double units) {
    return PowerOf(baseline, effect, units, design).power >= design.power;
  };
  double high = 2;
  while (!is_enough(high)) {
    high *= 2;
    if (high > kMostUnits) {
      return absl::OutOfRangeError(absl::StrCat("an effect of ", effect, " needs more than ",
                                                kMostUnits, " units; look for a larger one"));
    }
  }
  return PowerOf(baseline, effect, std::ceil(Least(high / 2, high, is_enough)), design);
}

absl::StatusOr<DetectableEffects> PlanEffects(const Baseline& baseline, int64_t units,
                                              const Design& design) {
  if (absl::Status status = Check(baseline, design); !status.ok()) return status;
  if (units < 1) return OutOf("the number of units", "[1, infinity)", static_cast<double>(units));
  const double all = static_cast<double>(units);
  return DetectableEffects{.up = LeastEffect(baseline, all, 1, design),
                           .down = LeastEffect(baseline, all, -1, design)};
}

absl::StatusOr<int64_t> PlanSampleRatioUnits(absl::Span<const double> weights, size_t arm,
                                             double loss, double power) {
  const bool are_positive =
      std::all_of(weights.begin(), weights.end(), [](double weight) { return weight > 0; });
  if (weights.size() < 2 || !are_positive || arm >= weights.size()) {
    return absl::InvalidArgumentError(
        "weights are positive, of two arms or more, one of them `arm`");
  }
  if (!(loss > 0 && loss < 1)) return OutOf("the loss", "(0, 1)", loss);
  if (!(power > kSampleRatioAlarm && power < 1)) return OutOf("the power", "(0.001, 1)", power);
  const double total = std::reduce(weights.begin(), weights.end());
  const double left = 1 - loss * weights[arm] / total;
  double by_unit = 0;  // of the non-centrality
  for (size_t i = 0; i < weights.size(); ++i) {
    const double share = weights[i] / total;
    const double counted = share * (i == arm ? 1 - loss : 1) / left;
    by_unit += (counted - share) * (counted - share) / share;
  }
  const double freedom = static_cast<double>(weights.size()) - 1;
  const double bound = boost::math::quantile(
      boost::math::complement(boost::math::chi_squared(freedom), kSampleRatioAlarm));
  const double non_centrality =
      boost::math::non_central_chi_squared::find_non_centrality(freedom, bound, 1 - power);
  return static_cast<int64_t>(std::ceil(non_centrality / by_unit));
}

}  // namespace epikv
