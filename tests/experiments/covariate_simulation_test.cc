#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>

#include "server/experiments/figures/comparison.h"
#include "server/experiments/figures/metric_tally.h"
#include "tests/fixtures/simulated_experiments.h"

// Which covariates may adjust a comparison, counted in experiments that are made up: what an arm
// has had a hand in takes the arm's effect out with the variance.

namespace epikv {
namespace covariate_simulation_test {

using testing::DoubleNear;

constexpr int kUnits = 4000;
constexpr int kTrials = kExperiments / 10;

// A unit: what it shows under its arm, and what is known of it.
struct Unit {
  double value = 0;
  std::optional<double> covariate;
};
using Draw = std::function<Unit(Random&, size_t arm)>;

// Means over experiments. Misses: at any look the interval left out the truth.
struct Found {
  double adjusted = 0, adjusted_misses = 0;  // by the covariate, whatever it is; at the last look
  double reported = 0, reported_misses = 0;  // by Compare
  double refused = 0;                        // CovariateDiffers, at any look
  double saved = 0;                          // of the variance, by Compare at the last look
};

// The asymptotic sequence of adjusted means, whatever the covariate is.
bool AdjustedMisses(const MetricSums& sums, double truth) {
  const MetricEstimates estimates = Estimate(sums);
  const ArmEstimate &c = estimates.arms[0], &t = estimates.arms[1];
  const double variance =
      estimates.Covariance(0, 0) + estimates.Covariance(1, 1) - 2 * estimates.Covariance(0, 1);
  const double tau_squared = kDefaultTau * kDefaultTau * (c.value_variance + t.value_variance) / 2;
  const double away = estimates.Mean(1) - estimates.Mean(0) - truth;
  return away * away > variance * MixtureBound(tau_squared / variance, kAlpha);
}

Found Simulate(double truth, uint64_t seed, const Draw& draw) {
  Found found;
  for (int i = 0; i < kTrials; ++i) {
    Random random(seed * 1'000'003 + static_cast<uint64_t>(i));
    MetricTally tally(2);
    bool adjusted_missed = false, reported_missed = false, refused = false;
    for (uint64_t unit = 0; unit < kUnits; ++unit) {
      const size_t arm = random.Chance(.5);
      const Unit drawn = draw(random, arm);
      tally.Add(arm, unit, drawn.value, drawn.covariate);
      if ((unit + 1) % (kUnits / kLooks) != 0) continue;
      adjusted_missed |= AdjustedMisses(tally.sums(), truth);
      reported_missed |= !Compare(tally.sums(), 0, 1, {}).interval.Holds(truth);
      refused |= CovariateDiffers(tally.sums());
    }
    const MetricEstimates estimates = Estimate(tally.sums());
    const Comparison comparison = Compare(tally.sums(), 0, 1, {});
    found.adjusted += estimates.Mean(1) - estimates.Mean(0);
    found.reported += *comparison.difference;
    found.adjusted_misses += adjusted_missed;
    found.reported_misses += reported_missed;
    found.refused += refused;
    found.saved += comparison.variance_saved.value_or(0);
  }
  for (double* sum : {&found.adjusted, &found.reported, &found.adjusted_misses,
                      &found.reported_misses, &found.refused, &found.saved}) {
    *sum /= kTrials;
  }
  Record("adjusted", found.adjusted);
  Record("reported", found.reported);
  Record("adjusted_misses", found.adjusted_misses);
  Record("reported_misses", found.reported_misses);
  Record("refused", found.refused);
  Record("saved", found.saved);
  return found;
}

// Answers lose what eviction moves: by 10 for each nat, so that arms of .02 and .05 nats differ by
// -.3. The prompt has a part in both: how much it suffers from any eviction.
constexpr double kTruth = -.3;
double KlOf(double hardness, size_t arm) { return (arm == 1 ? .05 : .02) * hardness; }
double ValueOf(Random& random, double kl) { return 5 - 10 * kl + random.Normal() / 3; }

TEST(CovariateSimulationTest, TheArmsOwnShadowKlTakesItsEffectOut) {
  const Found found = Simulate(kTruth, 1, [](Random& random, size_t arm) {
    const double kl = KlOf(random.Exponential(), arm);
    return Unit{.value = ValueOf(random, kl), .covariate = kl};
  });
  EXPECT_THAT(found.adjusted, DoubleNear(0, .02)) << "though it is " << kTruth;
  EXPECT_EQ(found.adjusted_misses, 1);
}

TEST(CovariateSimulationTest, WhatDiffersBetweenArmsDoesNotAdjust) {
  const Found found = Simulate(kTruth, 1, [](Random& random, size_t arm) {
    const double kl = KlOf(random.Exponential(), arm);
    return Unit{.value = ValueOf(random, kl), .covariate = kl};
  });
  EXPECT_EQ(found.refused, 1);
  EXPECT_THAT(found.reported, DoubleNear(kTruth, .01));
  EXPECT_LE(found.reported_misses, kAlpha);
  EXPECT_EQ(found.saved, 0);
}

// Also where one arm alone has it: the control, with a full cache, has no KL to tell.
TEST(CovariateSimulationTest, WhatOneArmAloneHasDoesNotAdjust) {
  const Found found = Simulate(kTruth, 2, [](Random& random, size_t arm) {
    const double kl = KlOf(random.Exponential(), arm);
    return Unit{.value = ValueOf(random, kl),
                .covariate = arm == 1 ? std::optional(kl) : std::nullopt};
  });
  EXPECT_EQ(found.refused, 1);
  EXPECT_LE(found.reported_misses, kAlpha);
}

// The KL that one policy, the same for both arms, gives on the unit's prompt.
TEST(CovariateSimulationTest, TheShadowKlOfAReferenceAdjusts) {
  const Found found = Simulate(kTruth, 3, [](Random& random, size_t arm) {
    const double hardness = random.Exponential();
    return Unit{.value = ValueOf(random, KlOf(hardness, arm)), .covariate = KlOf(hardness, 1)};
  });
  EXPECT_THAT(found.reported, DoubleNear(kTruth, .01));
  EXPECT_LE(found.adjusted_misses, kAlpha);
  EXPECT_LE(found.reported_misses, kAlpha);
  EXPECT_LE(found.refused, kCovariateAlarm + Slack(kCovariateAlarm, kTrials));
  // Of a variance of 1/9 + (10 * .035)^2, about, all but 1/9 and what arms differ in by unit.
  EXPECT_GE(found.saved, .4);
}

// Earlier outcomes: of 60 % of the units, the mean of three.
TEST(CovariateSimulationTest, EarlierOutcomesAdjustAsFarAsTheyAreKnown) {
  const Found found = Simulate(.2, 4, [](Random& random, size_t arm) {
    const double taste = random.Exponential();
    const double earlier = taste + random.Normal() / std::sqrt(3);
    const double value = taste + random.Normal() + (arm == 1 ? .2 : 0);
    return Unit{.value = value,
                .covariate = random.Chance(.6) ? std::optional(earlier) : std::nullopt};
  });
  EXPECT_THAT(found.reported, DoubleNear(.2, .01));
  EXPECT_LE(found.reported_misses, kAlpha);
  // The squared correlation, 1 / (2 * (1 + 1/3)), of 60 %.
  EXPECT_THAT(found.saved, DoubleNear(.6 * .375, .02));
}

// Lengths of prompts, and the like.
TEST(CovariateSimulationTest, ASoundCovariateIsHardlyEverRefused) {
  const Found found = Simulate(0, 5, [](Random& random, size_t) {
    const double length = std::exp(1.5 * random.Normal());
    return Unit{.value = std::log(length) + random.Normal(),
                .covariate = random.Chance(.9) ? std::optional(length) : std::nullopt};
  });
  EXPECT_LE(found.refused, .002 + Slack(.002, kTrials));
  EXPECT_LE(found.reported_misses, kAlpha);
}

}  // namespace covariate_simulation_test
}  // namespace epikv
