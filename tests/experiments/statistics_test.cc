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

#include "server/experiments/figures/comparison.h"
#include "server/experiments/figures/confidence_sequence.h"
#include "server/experiments/figures/metric_tally.h"
#include "server/experiments/figures/sample_ratio.h"
#include "tests/fixtures/counted_units.h"
#include "tests/fixtures/experiment_goldens.h"

namespace epikv {
namespace statistics_test {

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

TEST(SamenessTest, IsTheMixtureOfTheGoldens) {
  for (const json& row : ExperimentGoldens()["sameness"]) {
    std::vector<Estimated> estimates;
    for (size_t i = 0; i < row["values"].size(); ++i) {
      estimates.push_back({.value = row["values"][i], .variance = row["variances"][i]});
    }
    EXPECT_NEAR(SamenessPValue(estimates, row["tau_squared"]), row["p"], 1e-9) << row;
  }
}

TEST(SamenessTest, OfTwoIsThePValueOfTheirDifference) {
  const std::vector<Estimated> estimates = {{.value = 3, .variance = .2},
                                            {.value = 4.5, .variance = .1}};
  EXPECT_NEAR(SamenessPValue(estimates, .25), MixturePValue(1.5 * 1.5 / .3, .5 / .3), 1e-12);
}

TEST(SamenessTest, SaysNothingOfOne) { EXPECT_EQ(SamenessPValue({{3, .1}}, 1), 1); }

TEST(SubgroupsTest, ShareAlphaAmongAllThatIsSaid) {
  const SubgroupAlphas alphas = AlphaPerSubgroup(.06, {.arms = 3, .divisions = 2, .classes = 6});
  EXPECT_DOUBLE_EQ(alphas.interval, .06 / 12);
  EXPECT_DOUBLE_EQ(alphas.heterogeneity, .06 / 4);
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

// By hand: 12 of 20 that were lost are of an arm with half of all; the exact binomial test.
TEST(LossesTest, AreComparedWithWhatWasSettled) {
  EXPECT_NEAR(CheckLosses({{12, 8}}, {{500, 500}}).p_value, .503445, 1e-5);
  EXPECT_NEAR(CheckLosses({{30, 0}}, {{500, 500}}).p_value, std::pow(.5, 29), 1e-12);
  EXPECT_FALSE(CheckLosses({{100, 300}}, {{1000, 3000}}).alarm());
  EXPECT_TRUE(CheckLosses({{100, 100}}, {{1000, 3000}}).alarm());
}

TEST(LossesTest, WhereMostAreLostWhatIsKeptTells) {
  EXPECT_EQ(CheckLosses({{470, 500}}, {{500, 500}}).p_value,
            CheckLosses({{30, 0}}, {{500, 500}}).p_value);
}

TEST(LossesTest, SayNothingOfNothing) {
  EXPECT_EQ(CheckLosses({{0, 0}}, {{0, 0}}).p_value, 1);
  EXPECT_EQ(CheckLosses({{0, 0}}, {{9, 9}}).p_value, 1);
  EXPECT_EQ(CheckLosses({{9, 9}}, {{9, 9}}).p_value, 1);
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

constexpr AnalysisOptions kProportion = {.kind = MetricKind::kProportion};

Comparison CompareCounts(ArmSums control, ArmSums treatment,
                         const AnalysisOptions& options = kProportion) {
  return Compare({.arms = {control, treatment}}, 0, 1, options);
}

// num_units in each arm, normal, of standard deviation 1 and these means.
MetricTally Normal(int num_units, double control, double treatment, uint64_t seed = 4) {
  MetricTally tally(2);
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  for (int unit = 0; unit < num_units; ++unit) {
    tally.Add(0, 2 * unit, control + normal(random));
    tally.Add(1, 2 * unit + 1, treatment + normal(random));
  }
  return tally;
}

// The same, but exactly of these means: values are 1 more or less.
MetricTally Swinging(int num_units, double control, double treatment) {
  MetricTally tally(2);
  for (int unit = 0; unit < num_units; ++unit) {
    const double swing = unit % 2 == 0 ? 1 : -1;
    tally.Add(0, 2 * unit, control + swing);
    tally.Add(1, 2 * unit + 1, treatment + swing);
  }
  return tally;
}

TEST(ComparisonTest, TheDifferenceIsHeldByItsInterval) {
  const Comparison comparison = Compare(Normal(5000, 10, 10.5).sums(), 0, 1, {});
  EXPECT_EQ(comparison.basis, Basis::kAsymptotic);
  EXPECT_TRUE(comparison.interval.Holds(.5));
  EXPECT_FALSE(comparison.interval.Holds(0));
  // 1.96 standard errors would be .039; peeking for ever costs another half of it.
  EXPECT_THAT(comparison.interval.upper - *comparison.difference, DoubleNear(.062, .002));
  EXPECT_EQ(comparison.lift.set, Lift::Set::kInterval);
  EXPECT_TRUE(comparison.lift.Holds(.05));
  EXPECT_THAT(*comparison.lift.estimate, DoubleNear(.05, .005));
}

TEST(ComparisonTest, IntervalLiftAndPValueExcludeNoDifferenceTogether) {
  int excluded = 0;
  for (int seed = 0; seed < 200; ++seed) {
    const Comparison comparison = Compare(Normal(300, 2, 2.25, seed).sums(), 0, 1, {});
    const bool holds = comparison.interval.Holds(0);
    excluded += !holds;
    EXPECT_EQ(comparison.p_value > .05, holds);
    EXPECT_EQ(comparison.lift.Holds(0), holds);
  }
  EXPECT_THAT(excluded, testing::AllOf(testing::Gt(30), testing::Lt(170)));
  excluded = 0;
  for (int ones = 0; ones <= 90; ++ones) {
    const Comparison comparison = CompareCounts(CountedUnits(60, 20), CountedUnits(90, ones));
    ASSERT_EQ(comparison.basis, Basis::kExact);
    const bool holds = comparison.interval.Holds(0);
    excluded += !holds;
    EXPECT_EQ(comparison.p_value > .05, holds) << ones;
    EXPECT_EQ(comparison.lift.Holds(0), holds) << ones;
  }
  EXPECT_THAT(excluded, testing::AllOf(testing::Gt(15), testing::Lt(50)));
}

TEST(ComparisonTest, ArmsThatSwapTurnTheDifferenceRound) {
  const MetricTally tally = Normal(500, 1, 2);
  const Comparison there = Compare(tally.sums(), 0, 1, {}), back = Compare(tally.sums(), 1, 0, {});
  EXPECT_DOUBLE_EQ(there.interval.lower, -back.interval.upper);
  EXPECT_DOUBLE_EQ(there.p_value, back.p_value);
}

TEST(ComparisonTest, TooEarlyExcludesNothing) {
  const Comparison comparison = Compare(Normal(kLeastUnits - 1, 0, 9).sums(), 0, 1, {});
  EXPECT_EQ(comparison.basis, Basis::kTooEarly);
  EXPECT_EQ(comparison.control.units, kLeastUnits - 1);
  EXPECT_THAT(*comparison.difference, DoubleNear(9, .5)) << "only its interval is not known";
  EXPECT_TRUE(comparison.interval.Holds(-1e9));
  EXPECT_EQ(comparison.p_value, 1);
  EXPECT_EQ(comparison.lift.set, Lift::Set::kAll);
}

TEST(ComparisonTest, OfAnArmWithoutObservationsThereIsNoDifference) {
  MetricTally tally(2);
  tally.Add(0, 1, 5);
  const Comparison comparison = Compare(tally.sums(), 0, 1, {});
  EXPECT_EQ(comparison.difference, std::nullopt);
  EXPECT_EQ(comparison.basis, Basis::kTooEarly);
}

TEST(ComparisonTest, RareProportionsAreExactUntilBothArmsHaveEvents) {
  EXPECT_EQ(CompareCounts(CountedUnits(9, 1), CountedUnits(9000, 9)).basis, Basis::kTooEarly);
  EXPECT_EQ(CompareCounts(CountedUnits(20000, 20), CountedUnits(20000, 300)).basis, Basis::kExact);
  EXPECT_EQ(CompareCounts(CountedUnits(20000, 30), CountedUnits(20000, 300)).basis,
            Basis::kAsymptotic);
  EXPECT_EQ(CompareCounts(CountedUnits(20000, 19970), CountedUnits(20000, 19700)).basis,
            Basis::kAsymptotic);
}

TEST(ComparisonTest, ARunOfFailuresNeedsNoFailureOfTheOther) {
  const Comparison comparison = CompareCounts(CountedUnits(20, 0), CountedUnits(20, 19));
  EXPECT_GT(comparison.interval.lower, .1);
  EXPECT_LT(comparison.p_value, 1e-3);
  EXPECT_TRUE(std::isinf(comparison.lift.interval.upper)) << "nothing is known of the least rate";
}

TEST(ComparisonTest, AnArmThatNeverVariesIsNotTakenToBeCertain) {
  // Nothing of 200 against 30 of 9000: what equal rates give a time in two.
  AnalysisOptions mean;
  const Comparison rare = CompareCounts(CountedUnits(9000, 30), CountedUnits(200, 0), mean);
  EXPECT_EQ(rare.basis, Basis::kAsymptotic);
  EXPECT_TRUE(rare.interval.Holds(0));
  // A full cache evicts nothing, ever.
  MetricTally evicted(2);
  std::mt19937_64 random(5);
  std::exponential_distribution<double> tokens(.01);
  for (uint64_t unit = 0; unit < 2000; ++unit)
    evicted.Add(unit % 2, unit, unit % 2 * tokens(random));
  const Comparison certain = Compare(evicted.sums(), 0, 1, {});
  EXPECT_GT(certain.interval.lower, 50);
  EXPECT_NE(certain.lift.set, Lift::Set::kInterval) << "of nothing there is no part";
  EXPECT_EQ(certain.lift.estimate, std::nullopt);
}

TEST(ComparisonTest, ALiftIsUnboundedWhereTheControlMayBeZero) {
  const Comparison nothing = Compare(Swinging(500, .01, .02).sums(), 0, 1, {});
  EXPECT_EQ(nothing.lift.set, Lift::Set::kAll);
  // Of a treatment that is certainly not 0, all but small lifts are left.
  const Comparison rays = Compare(Swinging(500, .01, 5).sums(), 0, 1, {});
  EXPECT_EQ(rays.lift.set, Lift::Set::kTwoRays);
  EXPECT_FALSE(rays.lift.Holds(0));
  EXPECT_TRUE(rays.lift.Holds(1e6));
  EXPECT_TRUE(rays.lift.Holds(-1e6));
}

TEST(ComparisonTest, ACovariateThatExplainsAllLeavesNothingUncertain) {
  MetricTally tally(2);
  std::mt19937_64 random(6);
  std::normal_distribution<double> normal;
  for (uint64_t unit = 0; unit < 400; ++unit) {
    const double x = normal(random);
    tally.Add(unit % 2, unit, 3 * x + 5. * (unit % 2), x);
  }
  const Comparison comparison = Compare(tally.sums(), 0, 1, {});
  EXPECT_THAT(*comparison.difference, DoubleNear(5, 1e-9));
  EXPECT_LT(comparison.interval.upper - comparison.interval.lower, 1e-3);
}

TEST(ComparisonTest, AlphaIsSharedAmongTheArmsThatAreCompared) {
  EXPECT_DOUBLE_EQ(AlphaPerArm(.05, 2), .05);
  EXPECT_DOUBLE_EQ(AlphaPerArm(.05, 6), .01);
}

TEST(ArmReadingTest, OfAProportionIsExact) {
  const ArmReading reading = ReadArm({.arms = {CountedUnits(25000, 25)}}, 0, kProportion);
  EXPECT_EQ(reading.basis, Basis::kExact);
  EXPECT_THAT(reading.interval.lower, DoubleNear(.00039021, 1e-7));
  EXPECT_THAT(reading.interval.upper, DoubleNear(.00204756, 1e-7));
}

TEST(ArmReadingTest, ObservationsOfAUnitAreNoTrialsOfTheirOwn) {
  MetricTally tally(1);
  for (uint64_t i = 0; i < 5000; ++i) tally.Add(0, i % 50, i % 50 < 5);  // the same five fail
  const ArmReading reading = ReadArm(tally.sums(), 0, kProportion);
  const Interval of_units = ProportionSequence(5, 50, .05);
  EXPECT_NEAR(reading.interval.lower, of_units.lower, 1e-9);
  EXPECT_NEAR(reading.interval.upper, of_units.upper, 1e-9);
}

TEST(ArmReadingTest, OfAMeanIsTooEarlyForLonger) {
  EXPECT_EQ(ReadArm(Normal(110, 0, 0).sums(), 0, {}).basis, Basis::kTooEarly);
  EXPECT_EQ(ReadArm(Normal(400, 0, 0).sums(), 0, {}).basis, Basis::kAsymptotic);
}

TEST(GuardrailTest, IsBreachedOnlyWhenCertainlyWorseByMoreThanTheMargin) {
  const Comparison errors = CompareCounts(CountedUnits(5000, 100), CountedUnits(5000, 300));
  EXPECT_EQ(JudgeGuardrail(errors, Better::kLower, .01), Verdict::kBreached);
  EXPECT_EQ(JudgeGuardrail(errors, Better::kLower, .04), Verdict::kUndecided);
  EXPECT_EQ(JudgeGuardrail(errors, Better::kLower, .06), Verdict::kSafe);
  EXPECT_EQ(JudgeGuardrail(errors, Better::kHigher, 0), Verdict::kSafe);
}

TEST(SubgroupsTest, ThoseThatSayNothingYetTakeNoPart) {
  const Comparison early = Compare(Normal(20, 5, 4).sums(), 0, 1, {});
  const Comparison one = Compare(Normal(2000, 5, 4).sums(), 0, 1, {});
  const Comparison other = Compare(Normal(2000, 5, 5).sums(), 0, 1, {});
  EXPECT_EQ(CompareSubgroups({early, one}, .01).num_compared, 1);
  EXPECT_EQ(CompareSubgroups({early, one}, .01).p_value, 1);
  EXPECT_EQ(CompareSubgroups({early, one, other}, .01).p_value,
            CompareSubgroups({one, other}, .01).p_value);
  EXPECT_LT(CompareSubgroups({one, other}, .01).p_value, 1e-6);
  EXPECT_EQ(CompareSubgroups({one, other}, 0).num_compared, 0) << "all units say nothing yet";
}

MetricSums Differences(int units, double shift) {
  MetricTally tally(1);
  for (int i = 0; i < units; ++i) {
    tally.Add(0, static_cast<uint64_t>(i), shift + (i % 2 == 0 ? 1 : -1));
  }
  return tally.sums();
}

TEST(PairsTest, AreAMixtureOverTheirMean) {
  const Comparison found = ComparePairs(Differences(400, .25), .05);
  EXPECT_EQ(found.basis, Basis::kAsymptotic);
  EXPECT_NEAR(*found.difference, .25, 1e-12);
  const double variance = 1. / 399, spread = kPairTau * kPairTau / variance;
  const double radius = std::sqrt(MixtureBound(spread, .05) * variance);
  EXPECT_NEAR(found.interval.lower, .25 - radius, 1e-9);
  EXPECT_NEAR(found.interval.upper, .25 + radius, 1e-9);
  EXPECT_NEAR(found.p_value, MixturePValue(.0625 / variance, spread), 1e-12);
  EXPECT_LT(found.p_value, .05);
  EXPECT_GT(found.interval.lower, 0);
}

TEST(PairsTest, OfFewOrEqualOnesSayNothing) {
  EXPECT_EQ(ComparePairs(Differences(98, .25), .05).basis, Basis::kTooEarly);
  MetricTally equal(1);
  for (int i = 0; i < 1000; ++i) equal.Add(0, static_cast<uint64_t>(i), 0);
  const Comparison found = ComparePairs(equal.sums(), .05);
  EXPECT_EQ(found.basis, Basis::kTooEarly);
  EXPECT_EQ(found.difference, 0);
  EXPECT_EQ(ComparePairs(MetricTally(1).sums(), .05).difference, std::nullopt);
}

TEST(GuardrailTest, IsSafeWhereNothingEverFails) {
  EXPECT_EQ(
      JudgeGuardrail(CompareCounts(CountedUnits(5, 0), CountedUnits(5, 0)), Better::kLower, .01),
      Verdict::kTooEarly);
  EXPECT_EQ(
      JudgeGuardrail(CompareCounts(CountedUnits(50, 0), CountedUnits(50, 0)), Better::kLower, .01),
      Verdict::kUndecided);
  EXPECT_EQ(JudgeGuardrail(CompareCounts(CountedUnits(2000, 0), CountedUnits(2000, 0)),
                           Better::kLower, .01),
            Verdict::kSafe);
}

TEST(GuardrailTest, ALossOfWhatIsBetterHigherIsABreach) {
  const Comparison quality = Compare(Normal(2000, 5, 4).sums(), 0, 1, {});
  EXPECT_EQ(JudgeGuardrail(quality, Better::kHigher, .5), Verdict::kBreached);
  EXPECT_EQ(JudgeGuardrail(quality, Better::kLower, .5), Verdict::kSafe);
}

// Whatever users record, there is something to be said of it, if only that it is too early.
TEST(ComparisonTest, HasAnAnswerToAnyValues) {
  const std::vector<std::vector<double>> sets = {
      {1},      {0, 1},           {1e50, -1e50},    {1e50},         {1e-300, 0},
      {5e-324}, {1, 1 + 2.3e-16}, {1e50, 1, 1e-50}, {-1e25, 1e-25}, {0.1, 1e16}};
  std::mt19937_64 rng(1);
  for (const auto& values : sets) {
    for (const auto& others : sets) {
      for (int64_t units : {1, 30, 300, 3000}) {
        for (bool with_covariate : {false, true}) {
          MetricTally tally(2);
          for (int64_t unit = 0; unit < units; ++unit) {
            const auto& set = unit % 2 == 0 ? values : others;
            std::optional<double> covariate;
            if (with_covariate) covariate = others[rng() % others.size()];
            tally.Add(unit % 2, unit, set[rng() % set.size()], covariate);
          }
          for (MetricKind kind : {MetricKind::kMean, MetricKind::kProportion}) {
            const AnalysisOptions options = {.kind = kind};
            EXPECT_NO_THROW({
              ReadArm(tally.sums(), 0, options);
              ReadArm(tally.sums(), 1, options);
              JudgeGuardrail(Compare(tally.sums(), 0, 1, options), Better::kLower, 0.1);
            }) << values[0]
               << " beside " << others[0] << ", " << units << " units";
          }
        }
      }
    }
  }
}

}  // namespace statistics_test
}  // namespace epikv
