#include "server/experiments/figures/planner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

#include "tests/fixtures/experiment_goldens.h"

namespace epikv {
namespace planner_test {

using nlohmann::json;
using testing::DoubleNear;
using testing::HasSubstr;

constexpr Baseline kMeanOfOne = {.kind = MetricKind::kMean, .sd = 1};

Baseline Rate(double rate) { return {.kind = MetricKind::kProportion, .rate = rate}; }

TEST(CrossingProbabilityTest, IsThatOfTheMultivariateNormal) {
  for (const json& row : ExperimentGoldens()["crossings"]) {
    const auto bounds = row["bounds"].get<std::vector<double>>();
    EXPECT_NEAR(CrossingProbability(bounds, row["drift"]), row["chance"], 2e-6) << row;
  }
}

// Armitage, McPherson, Rowe 1969, table 2.
TEST(CrossingProbabilityTest, RepeatedTestsAtFivePercentAlarmAsOftenAsKnown) {
  const auto alarms = [](int looks) {
    return CrossingProbability(std::vector<double>(looks, 1.959964), 0);
  };
  EXPECT_THAT(alarms(1), DoubleNear(.05, 1e-6));
  EXPECT_THAT(alarms(2), DoubleNear(.083, 5e-4));
  EXPECT_THAT(alarms(5), DoubleNear(.142, 5e-4));
  EXPECT_THAT(alarms(10), DoubleNear(.193, 5e-4));
  EXPECT_THAT(alarms(20), DoubleNear(.248, 5e-4));
  EXPECT_THAT(alarms(50), DoubleNear(.320, 5e-4));
}

TEST(CrossingProbabilityTest, LooksWithoutABoundFindNothing) {
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(CrossingProbability({infinity, infinity}, 9), 0);
  EXPECT_THAT(CrossingProbability({infinity, infinity, 1.959964}, 0), DoubleNear(.05, 1e-6));
  EXPECT_THAT(CrossingProbability({infinity, 2, infinity}, 3),
              DoubleNear(CrossingProbability({infinity, 2, 99}, 3), 1e-7));
}

TEST(CrossingProbabilityTest, NothingEscapesABoundOfZero) {
  EXPECT_EQ(CrossingProbability({0, 5}, 0), 1);
  EXPECT_EQ(CrossingProbability({3, 3}, 100), 1);
}

TEST(PlanTest, TheSequenceAlarmsAtMostWithAlphaHoweverManyLooks) {
  double last = 0;
  for (int looks : {1, 5, 20, 200}) {
    const Design design = {.looks = looks, .tuning = Tuning::kLastLook};
    // So small an effect is none.
    const double power = PlanPower(kMeanOfOne, 1e-9, 1'000'000, design)->power;
    EXPECT_GT(power, last);
    EXPECT_LT(power, .05);
    last = power;
  }
  EXPECT_GT(last, .015) << "it holds for looks without end";
}

TEST(PlanTest, UnitsEffectAndPowerAgree) {
  for (const Tuning tuning : {Tuning::kDefault, Tuning::kLastLook}) {
    const Design design = {.control_share = .6, .treatment_share = .2, .tuning = tuning};
    const UnitPlan plan = *PlanUnits(kMeanOfOne, -.1, design);
    EXPECT_THAT(plan.power, DoubleNear(.8, .001));
    EXPECT_GE(plan.power, .8);
    EXPECT_DOUBLE_EQ(PlanPower(kMeanOfOne, .1, plan.units, design)->power, plan.power);
    const DetectableEffects effects = *PlanEffects(kMeanOfOne, plan.units, design);
    EXPECT_THAT(*effects.up, DoubleNear(.1, .0002));
    EXPECT_DOUBLE_EQ(*effects.down, -*effects.up);
  }
}

// One look of the sequence that is tightest there is a test at z^2 = TightestSpread + 1.
TEST(PlanTest, OneLookIsAPlainTestAtTheSequencesBound) {
  const Design design = {.looks = 1, .tuning = Tuning::kLastLook};
  const UnitPlan plan = *PlanUnits(kMeanOfOne, .1, design);
  const double z = std::sqrt(TightestSpread(.05) + 1) + .8416212;
  const double units = 4 * z * z / (.1 * .1);
  EXPECT_THAT(static_cast<double>(plan.units), DoubleNear(units, 2e-3 * units));
}

TEST(PlanTest, TuningToTheLastLookSavesUnits) {
  const Design standard, tuned = {.tuning = Tuning::kLastLook};
  const UnitPlan plan = *PlanUnits(kMeanOfOne, .01, tuned);
  EXPECT_LT(plan.units, .9 * PlanUnits(kMeanOfOne, .01, standard)->units);
  EXPECT_THAT(plan.tau, DoubleNear(.0078, .0002)) << "about the effect that it looks for";
  EXPECT_DOUBLE_EQ(PlanUnits(kMeanOfOne, .01, standard)->tau, kDefaultTau);
}

TEST(PlanTest, ACovariateSavesWhatItExplains) {
  const Design plain = {.tuning = Tuning::kLastLook},
               adjusted = {.covariate_r2 = .5, .tuning = Tuning::kLastLook};
  const double units = static_cast<double>(PlanUnits(kMeanOfOne, .1, plain)->units);
  EXPECT_THAT(static_cast<double>(PlanUnits(kMeanOfOne, .1, adjusted)->units),
              DoubleNear(units / 2, 3e-3 * units));
}

TEST(PlanTest, ARareProportionNeedsItsEventsFirst) {
  // So large an effect would show in fewer, but for the 25 ones that each arm must have: 37.2 less
  // two standard deviations.
  const UnitPlan plan = *PlanUnits(Rate(.001), .05, {});
  EXPECT_THAT(static_cast<double>(plan.units), DoubleNear(74'250, 400));
}

TEST(PlanTest, ChanceMayDealAnArmFewerUnitsThanItsShare) {
  // 115.2 less two standard deviations are the 100 that an arm must have.
  EXPECT_THAT(static_cast<double>(PlanUnits(kMeanOfOne, 9, {})->units), DoubleNear(230.4, 1));
}

TEST(PlanTest, EffectsOfAProportionDifferUpAndDown) {
  const DetectableEffects effects = *PlanEffects(Rate(.1), 5000, {});
  EXPECT_GT(*effects.up, -*effects.down) << "greater rates vary more";
  EXPECT_THAT(PlanPower(Rate(.1), *effects.up, 5000, {})->power, DoubleNear(.8, .005));
  EXPECT_THAT(PlanPower(Rate(.1), *effects.down, 5000, {})->power, DoubleNear(.8, .005));
  EXPECT_EQ(PlanEffects(Rate(.01), 5000, {})->down, std::nullopt) << "50 ones are too few to halve";
}

TEST(PlanTest, PairsNeedAFourthOfASplitsUnitsOfTheSameDeviation) {
  const Design design = {.paired = true};
  const UnitPlan pairs = *PlanUnits(kMeanOfOne, .1, design);
  EXPECT_THAT(pairs.power, DoubleNear(.8, .001));
  EXPECT_EQ(pairs.tau, kPairTau);
  const double split = static_cast<double>(PlanUnits(kMeanOfOne, .1, {})->units);
  EXPECT_THAT(static_cast<double>(pairs.units) / split, DoubleNear(.25, .04));
  EXPECT_THAT(*PlanEffects(kMeanOfOne, pairs.units, design)->up, DoubleNear(.1, .0002));
  EXPECT_GE(PlanUnits(kMeanOfOne, 9, design)->units, kLeastUnits) << "before it is too early";
  EXPECT_THAT(PlanUnits(Rate(.1), .05, design).status().message(), HasSubstr("rate"));
}

// The thread that plans is everybody's.
TEST(PlanTest, NumbersThatAreAlmostZeroEnd) {
  const auto of_mean = [](double sd) {
    return PlanEffects({.kind = MetricKind::kMean, .sd = sd}, 10'000, {}).ok();
  };
  for (const double sd : {1e-100, 1e100}) EXPECT_TRUE(of_mean(sd)) << sd;
  for (const double sd : {5e-324, 1e-161, 1.58e-159, 1e300}) EXPECT_FALSE(of_mean(sd)) << sd;
  EXPECT_TRUE(PlanEffects(Rate(1e-100), 100, {}).ok());
  EXPECT_FALSE(PlanEffects(Rate(5e-324), 100, {}).ok());
}

TEST(PlanTest, SaysWhatIsOutOfRange) {
  EXPECT_THAT(PlanUnits(kMeanOfOne, 0, {}).status().message(), HasSubstr("effect"));
  EXPECT_THAT(PlanUnits(kMeanOfOne, 1, {.alpha = 0}).status().message(), HasSubstr("alpha"));
  EXPECT_THAT(PlanUnits(kMeanOfOne, 1, {.power = 1}).status().message(), HasSubstr("power"));
  EXPECT_THAT(PlanUnits(kMeanOfOne, 1, {.looks = 201}).status().message(), HasSubstr("200"));
  EXPECT_THAT(PlanUnits(kMeanOfOne, 1, {.covariate_r2 = 1}).status().message(), HasSubstr("R^2"));
  EXPECT_THAT(PlanUnits(kMeanOfOne, 1, {.treatment_share = .6}).status().message(),
              HasSubstr("shares"));
  EXPECT_THAT(PlanUnits({}, 1, {}).status().message(), HasSubstr("standard deviation"));
  EXPECT_THAT(PlanUnits(Rate(.9), .1, {}).status().message(), HasSubstr("rate"));
  EXPECT_THAT(PlanPower(kMeanOfOne, 1, 0, {}).status().message(), HasSubstr("units"));
  EXPECT_EQ(PlanUnits(kMeanOfOne, 1e-9, {}).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_FALSE(PlanEffects(kMeanOfOne, 100, {.looks = 0}).ok());
}

TEST(PlanSampleRatioTest, IsThatOfTheNonCentralChiSquared) {
  for (const json& row : ExperimentGoldens()["sample_ratio_units"]) {
    const auto weights = row["weights"].get<std::vector<double>>();
    const int64_t units = *PlanSampleRatioUnits(weights, row["arm"], row["loss"], row["power"]);
    EXPECT_NEAR(static_cast<double>(units), row["units"], 2) << row;
  }
}

TEST(PlanSampleRatioTest, SaysWhatIsOutOfRange) {
  EXPECT_FALSE(PlanSampleRatioUnits(std::vector<double>{1}, 0, .01, .8).ok());
  EXPECT_FALSE(PlanSampleRatioUnits({{1, 0}}, 0, .01, .8).ok());
  EXPECT_FALSE(PlanSampleRatioUnits({{1, 1}}, 2, .01, .8).ok());
  EXPECT_FALSE(PlanSampleRatioUnits({{1, 1}}, 0, 0, .8).ok());
  EXPECT_FALSE(PlanSampleRatioUnits({{1, 1}}, 0, .01, .0005).ok());
}

}  // namespace planner_test
}  // namespace epikv
