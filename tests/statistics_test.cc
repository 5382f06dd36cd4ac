#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "server/experiments/confidence_sequence.h"
#include "server/experiments/metric_tally.h"
#include "server/experiments/sample_ratio.h"
#include "tests/experiment_goldens.h"

namespace epikv {
namespace {

using nlohmann::json;
using testing::DoubleNear;

TEST(SampleRatioTest, IsPearsonsOrExactAsTheGoldens) {
  for (const json& row : ExperimentGoldens()["sample_ratio"]) {
    const auto units = row["units"].get<std::vector<int64_t>>();
    const auto weights = row["weights"].get<std::vector<double>>();
    const SampleRatio ratio = CheckSampleRatio(units, weights);
    EXPECT_NEAR(ratio.statistic, row["statistic"], 1e-9 * (1 + ratio.statistic)) << row;
    EXPECT_NEAR(ratio.p_value, row["p"], 1e-9) << row;
  }
}

TEST(SampleRatioTest, WeightsHaveAnySum) {
  const std::vector<int64_t> units = {480, 520};
  const SampleRatio of_thousand = CheckSampleRatio(units, std::vector<double>{500, 500});
  EXPECT_DOUBLE_EQ(of_thousand.p_value,
                   CheckSampleRatio(units, std::vector<double>{.1, .1}).p_value);
}

TEST(SampleRatioTest, AlarmsAtOneInAThousand) {
  const std::vector<double> weights = {1, 1};
  EXPECT_FALSE(CheckSampleRatio({{5164, 4836}}, weights).alarm());
  EXPECT_TRUE(CheckSampleRatio({{5165, 4835}}, weights).alarm());
}

TEST(SampleRatioTest, SaysNothingOfNothing) {
  EXPECT_EQ(CheckSampleRatio({{0, 0}}, {{.5, .5}}).p_value, 1);
  EXPECT_EQ(CheckSampleRatio({{1, 0}}, {{.5, .5}}).p_value, 1);
  EXPECT_EQ(CheckSampleRatio({{9, 0}}, {{1, 0}}).p_value, 1);
}

TEST(SampleRatioTest, UnitsOfAnArmWithoutWeightAreCertainlyWrong) {
  EXPECT_EQ(CheckSampleRatio({{9, 9, 1}}, {{1, 1, 0}}).p_value, 0);
}

TEST(SampleRatioTest, FewUnitsOfARareArmAreNoAlarm) {
  // Chi-squared would give .0001: five where one is expected.
  const SampleRatio ratio = CheckSampleRatio({{96, 5}}, {{.99, .01}});
  EXPECT_LT(std::erfc(std::sqrt(ratio.statistic / 2)), kSampleRatioAlarm);
  EXPECT_FALSE(ratio.alarm());
}

MetricTally TallyOf(const json& row) {
  MetricTally tally(3);
  for (const json& o : row["observations"]) {
    std::optional<double> covariate;
    if (!o[3].is_null()) covariate = o[3].get<double>();
    tally.Add(o[0], o[1], o[2], covariate);
  }
  return tally;
}

TEST(MetricTallyTest, MeansAndVariancesAreThoseOfAClusteredRegression) {
  for (const json& row : ExperimentGoldens()["arm_means"]) {
    const MetricEstimates estimates = Estimate(TallyOf(row).sums());
    for (size_t arm = 0; arm < 3; ++arm) {
      const double mean = row["means"][arm], variance = row["variances"][arm];
      EXPECT_NEAR(*estimates.arms[arm].mean, mean, 1e-12 * std::abs(mean)) << row["name"];
      EXPECT_NEAR(estimates.arms[arm].variance, variance, 1e-9 * variance) << row["name"];
    }
  }
}

TEST(MetricTallyTest, AdjustsByTheCovariateAsTheGoldens) {
  int adjusted = 0;
  for (const json& row : ExperimentGoldens()["arm_means"]) {
    if (!row.contains("coefficient")) continue;
    ++adjusted;
    const MetricEstimates estimates = Estimate(TallyOf(row).sums());
    EXPECT_NEAR(estimates.coefficient, row["coefficient"], 1e-9) << row["name"];
    for (size_t arm = 0; arm < 3; ++arm) {
      EXPECT_NEAR(estimates.Mean(arm), row["adjusted"][arm], 1e-9) << row["name"];
    }
    const double variance =
        estimates.Covariance(2, 2) + estimates.Covariance(0, 0) - 2 * estimates.Covariance(0, 2);
    EXPECT_NEAR(variance, row["variance_of_difference"], 1e-9) << row["name"];
    EXPECT_LT(variance, .7 * (estimates.arms[2].variance + estimates.arms[0].variance));
  }
  EXPECT_EQ(adjusted, 2);
}

TEST(MetricTallyTest, ACovariateThatNeverChangesChangesNothing) {
  MetricTally with(2), without(2);
  std::mt19937_64 random(1);
  std::normal_distribution<double> normal(5, 2);
  for (uint64_t unit = 0; unit < 200; ++unit) {
    const double value = normal(random);
    with.Add(unit % 2, unit, value, 1e6 / 3);
    without.Add(unit % 2, unit, value);
  }
  const MetricEstimates adjusted = Estimate(with.sums()), plain = Estimate(without.sums());
  EXPECT_EQ(adjusted.coefficient, 0);
  EXPECT_EQ(adjusted.Mean(1), plain.Mean(1));
  EXPECT_EQ(adjusted.Covariance(1, 1), plain.arms[1].variance);
}

TEST(MetricTallyTest, TheCovariateOfAUnitIsThatOfItsFirstObservation) {
  // Later covariates follow the arm: prompts that hold answers, and answers of arm 1 are longer.
  MetricTally tally(2), first_alone(2);
  std::mt19937_64 random(2);
  std::normal_distribution<double> normal;
  for (uint64_t unit = 0; unit < 400; ++unit) {
    const size_t arm = unit % 2;
    const double x = normal(random);
    for (int turn = 0; turn < 3; ++turn) {
      const double value = x + normal(random) + static_cast<double>(arm);
      tally.Add(arm, unit, value, x + turn * 2. * static_cast<double>(arm));
      first_alone.Add(arm, unit, value, turn == 0 ? std::optional(x) : std::nullopt);
    }
  }
  const MetricEstimates estimates = Estimate(tally.sums());
  EXPECT_EQ(estimates.Mean(1) - estimates.Mean(0),
            Estimate(first_alone.sums()).Mean(1) - Estimate(first_alone.sums()).Mean(0));
  EXPECT_THAT(estimates.Mean(1) - estimates.Mean(0), DoubleNear(1, .3));
}

TEST(MetricTallyTest, AUnitThatHasNoCovariateAtFirstNeverHasOne) {
  MetricTally tally(1);
  tally.Add(0, 1, 2.);
  tally.Add(0, 1, 3., 7.);
  EXPECT_EQ(tally.sums().arms[0].covered, 0);
}

TEST(MetricTallyTest, RefusesWhatItCannotCount) {
  MetricTally tally(2);
  EXPECT_EQ(tally.Add(0, 1, 2.), MetricTally::Added::kCounted);
  EXPECT_EQ(tally.Add(1, 1, 2.), MetricTally::Added::kOtherArm);
  EXPECT_EQ(tally.Add(0, 2, std::nan("")), MetricTally::Added::kOutOfRange);
  EXPECT_EQ(tally.Add(0, 2, 1e51), MetricTally::Added::kOutOfRange);
  EXPECT_EQ(tally.Add(0, 2, 1., std::numeric_limits<double>::infinity()),
            MetricTally::Added::kOutOfRange);
  const MetricEstimates estimates = Estimate(tally.sums());
  EXPECT_EQ(estimates.arms[0].units, 1);
  EXPECT_EQ(estimates.arms[1].mean, std::nullopt);
}

TEST(MetricTallyTest, LargeEqualValuesHaveNoVariance) {
  MetricTally tally(1);
  for (uint64_t unit = 0; unit < 1000; ++unit) tally.Add(0, unit % 300, 1e9 / 7);
  const ArmEstimate arm = Estimate(tally.sums()).arms[0];
  EXPECT_DOUBLE_EQ(*arm.mean, 1e9 / 7);
  EXPECT_EQ(arm.variance, 0);
  EXPECT_EQ(arm.effective_units, 0);
}

TEST(MetricTallyTest, EffectiveUnitsOfAProportionAreAboutTheRarer) {
  MetricTally tally(2);
  for (uint64_t unit = 0; unit < 20000; ++unit) {
    tally.Add(0, 2 * unit, unit % 500 == 0);
    tally.Add(1, 2 * unit + 1, unit % 500 != 0);
  }
  const MetricEstimates estimates = Estimate(tally.sums());
  EXPECT_THAT(estimates.arms[0].effective_units, DoubleNear(40, .5));
  EXPECT_THAT(estimates.arms[1].effective_units, DoubleNear(40, .5));
}

TEST(MetricTallyTest, OneUnitWithMostObservationsLeavesFewEffectiveUnits) {
  MetricTally tally(1);
  std::mt19937_64 random(3);
  std::normal_distribution<double> normal;
  for (int i = 0; i < 10000; ++i) tally.Add(0, i % 2 == 0 ? 0 : i, normal(random));
  EXPECT_LT(Estimate(tally.sums()).arms[0].effective_units, 5);
}

TEST(ConfidenceSequenceTest, TheMixtureIsRobbinsAsTheGoldens) {
  for (const json& row : ExperimentGoldens()["mixture"]) {
    const double alpha = row["alpha"], spread = row["spread"], bound = row["bound"];
    EXPECT_NEAR(MixtureBound(spread, alpha), bound, 1e-7 * bound) << row;
    EXPECT_NEAR(MixturePValue(bound, spread), alpha, 1e-6) << row;
    if (!row.contains("tightest")) continue;
    EXPECT_NEAR(TightestSpread(alpha), row["tightest"], 1e-4) << row;
  }
}

TEST(ConfidenceSequenceTest, ProportionsAreBetaBinomialAsTheGoldens) {
  for (const json& row : ExperimentGoldens()["proportions"]) {
    const Interval interval = ProportionSequence(row["ones"], row["trials"], row["alpha"]);
    EXPECT_NEAR(interval.lower, row["lower"], 1e-8 * interval.lower) << row;
    EXPECT_NEAR(interval.upper, row["upper"], 1e-8 * interval.upper) << row;
  }
}

TEST(ConfidenceSequenceTest, NoTrialsExcludeNothing) {
  const Interval interval = ProportionSequence(0, 0, .05);
  EXPECT_EQ(interval.lower, 0);
  EXPECT_EQ(interval.upper, 1);
}

TEST(ConfidenceSequenceTest, EvidenceAgainstTheImpossibleIsInfinite) {
  EXPECT_TRUE(std::isinf(ProportionEvidence(1, 2).Against(0)));
  EXPECT_TRUE(std::isinf(ProportionEvidence(1, 2).Against(1)));
  EXPECT_LT(ProportionEvidence(0, 2).Against(0), 0);
}

}  // namespace
}  // namespace epikv
