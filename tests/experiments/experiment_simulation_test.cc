#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <vector>

#include "server/experiments/figures/comparison.h"
#include "server/experiments/figures/metric_tally.h"
#include "server/experiments/figures/planner.h"
#include "server/experiments/figures/sample_ratio.h"
#include "tests/fixtures/counted_units.h"
#include "tests/fixtures/simulated_experiments.h"

// What statistics promise of experiments, counted in experiments that are made up: no step of these
// is taken but by the code that reports use. Seeds are fixed, and shares are recorded as properties
// (--gtest_output=xml).

namespace epikv {
namespace experiment_simulation_test {

using testing::AllOf;
using testing::DoubleNear;
using testing::Gt;
using testing::Le;
using testing::Lt;

constexpr AnalysisOptions kMean;
constexpr AnalysisOptions kProportion = {.kind = MetricKind::kProportion};

struct Traffic {
  int observations = 2000;  // per experiment, of all arms
  double treatment_share = .5;
};

// Adds an experiment's next observation.
using Stream = std::function<void(Random&, MetricTally&)>;
// The answer to a look, true where it ends the experiment.
using Look = std::function<bool(const MetricSums&)>;

// The share of experiments that a look has ended. `begin` starts the stream of one.
double ShareEnded(int experiments, const Traffic& traffic, uint64_t seed,
                  const std::function<Stream()>& begin, const Look& look) {
  int ended = 0;
  for (int experiment = 0; experiment < experiments; ++experiment) {
    Random random(seed * 1'000'003 + experiment);
    const Stream add = begin();
    MetricTally tally(2);
    for (int i = 1; i <= traffic.observations; ++i) {
      add(random, tally);
      if (i * kLooks % traffic.observations >= kLooks || !look(tally.sums())) continue;
      ++ended;
      break;
    }
  }
  return static_cast<double>(ended) / experiments;
}

// New units, one observation each. draw: (random, arm) -> value.
template <typename Draw>
std::function<Stream()> Singles(double treatment_share, Draw draw) {
  return [=]() -> Stream {
    return [=, unit = uint64_t{0}](Random& random, MetricTally& tally) mutable {
      const size_t arm = random.Chance(treatment_share);
      tally.Add(arm, unit++, draw(random, arm));
    };
  };
}

// Units that return, four times each on the whole and some much more often, with a taste of their
// own. draw: (random, taste) -> value. `is_blind`: as if each observation were another unit's.
template <typename Draw>
std::function<Stream()> Returning(double treatment_share, bool is_blind, Draw draw) {
  struct Unit {
    size_t arm;
    double taste;
  };
  return [=]() -> Stream {
    return [=, units = std::vector<Unit>(), i = uint64_t{0}](Random& random,
                                                             MetricTally& tally) mutable {
      const bool is_new = units.size() < 2 || random.Chance(.25);
      if (is_new) units.push_back({random.Chance(treatment_share), random.Uniform()});
      const size_t unit = is_new ? units.size() - 1 : random() % units.size();
      tally.Add(units[unit].arm, is_blind ? i++ : unit, draw(random, units[unit].taste));
    };
  };
}

// How requests of a switchback experiment are dealt and counted.
struct Switching {
  bool is_blind = false;    // as if each request were a unit, not its window
  bool alternates = false;  // strictly, arm after arm
  bool is_output = false;   // once a window: how many requests it had
};

// Requests in windows, each of which is dealt by itself. The load drifts from window to window, and
// something comes back in every second one: the more load, the more requests, and the longer each.
std::function<Stream()> InWindows(const Switching& switching) {
  return [=]() -> Stream {
    return [=, window = uint64_t{0}, request = uint64_t{0}, left = 0, arm = size_t{0}, drift = 0.](
               Random& random, MetricTally& tally) mutable {
      if (left == 0) {
        ++window;
        arm = switching.alternates ? window % 2 : random.Chance(.5);
        drift = .95 * drift + std::sqrt(1 - .95 * .95) * random.Normal();
        left = 1 + static_cast<int>(6 * std::exp(drift / 2) * random.Exponential());
        if (switching.is_output) {
          tally.Add(arm, window, left);
          left = 0;
          return;
        }
      }
      --left;
      const double load = std::exp(drift / 2) + (window % 2 == 0 ? 2 : 0);
      tally.Add(arm, switching.is_blind ? request++ : window, load * random.Exponential());
    };
  };
}

Look Alarm(const AnalysisOptions& options) {
  return
      [options](const MetricSums& sums) { return !Compare(sums, 0, 1, options).interval.Holds(0); };
}

// As one who knows nothing of looking often: a plain test at each look.
bool FixedHorizonAlarm(const MetricSums& sums) {
  const MetricEstimates estimates = Estimate(sums);
  if (estimates.arms[0].units < 30 || estimates.arms[1].units < 30) return false;
  const double variance = estimates.arms[0].variance + estimates.arms[1].variance;
  return std::abs(estimates.Mean(1) - estimates.Mean(0)) > 1.959964 * std::sqrt(variance);
}

struct Start {
  double effective_units = 0;  // of each arm
  double alpha = kAlpha;
};

// The asymptotic sequence of plain means, from here on: how many times its radius the difference
// is.
double RadiiFrom(const Start& start, const MetricSums& sums) {
  const MetricEstimates estimates = Estimate(sums);
  const ArmEstimate &c = estimates.arms[0], &t = estimates.arms[1];
  const double variance = c.variance + t.variance;
  if (c.units < 2 || t.units < 2 || variance == 0) return 0;
  if (std::min(c.effective_units, t.effective_units) < start.effective_units) return 0;
  const double tau_squared = kDefaultTau * kDefaultTau * (c.value_variance + t.value_variance) / 2;
  return (*t.mean - *c.mean) /
         std::sqrt(variance * MixtureBound(tau_squared / variance, start.alpha));
}

bool HastyAlarm(const MetricSums& sums) { return std::abs(RadiiFrom({}, sums)) > 1; }

Look Misses(const AnalysisOptions& options, size_t arm, double mean) {
  return [=](const MetricSums& sums) { return !ReadArm(sums, arm, options).interval.Holds(mean); };
}

Look MissesLift(const AnalysisOptions& options, double lift) {
  return [=](const MetricSums& sums) { return !Compare(sums, 0, 1, options).lift.Holds(lift); };
}

// The share of A/A experiments with a false alarm at any look.
double FalseAlarms(const Traffic& traffic, uint64_t seed, const std::function<Stream()>& begin,
                   const Look& look, const char* what = "alarms") {
  const double share = ShareEnded(kExperiments, traffic, seed, begin, look);
  Record(what, share);
  return share;
}

double Exponential(Random& random, size_t arm) { return random.Exponential(); }
double LogNormal(Random& random, size_t arm) { return random.LogNormal(); }
double HeavyLogNormal(Random& random, size_t arm) { return std::exp(1.5 * random.Normal()); }

TEST(FalseAlarmTest, OfSkewedMeans) {
  EXPECT_LE(FalseAlarms({}, 1, Singles(.5, Exponential), Alarm(kMean)), kAlpha);
}

TEST(FalseAlarmTest, OfSkewedMeansInUnequalArms) {
  EXPECT_LE(FalseAlarms({.observations = 4000}, 2, Singles(.1, LogNormal), Alarm(kMean)), kAlpha);
}

TEST(FalseAlarmTest, OfMeansOfMostlyNothing) {
  const auto draw = [](Random& random, size_t arm) {
    return random.Chance(.1) ? random.Exponential() : 0.;
  };
  const double alarms =
      ShareEnded(kExperiments / 5, {.observations = 20'000}, 3, Singles(.1, draw), Alarm(kMean));
  Record("alarms", alarms);
  EXPECT_LE(alarms, kAlpha);
}

TEST(FalseAlarmTest, OfUnitsThatReturn) {
  const auto draw = [](Random& random, double taste) { return 3 * taste + random.Exponential(); };
  EXPECT_LE(FalseAlarms({.observations = 4000}, 4, Returning(.5, false, draw), Alarm(kMean)),
            kAlpha);
}

TEST(FalseAlarmTest, OfSharesOfUnitsThatReturn) {
  const auto draw = [](Random& random, double taste) {
    return static_cast<double>(random.Chance(taste * taste));
  };
  EXPECT_LE(FalseAlarms({.observations = 4000}, 5, Returning(.2, false, draw), Alarm(kProportion)),
            kAlpha);
}

// Of some units the covariate is not known; of the rest it explains half of the variance.
std::function<Stream()> WithCovariate(double treatment_share, double missing, double effect) {
  return [=]() -> Stream {
    return [=, unit = uint64_t{0}](Random& random, MetricTally& tally) mutable {
      const size_t arm = random.Chance(treatment_share);
      const double x = random.Exponential();
      const double value = x + random.Exponential() + (arm == 1 ? effect : 0);
      tally.Add(arm, unit++, value, random.Chance(missing) ? std::nullopt : std::optional(100 + x));
    };
  };
}

TEST(FalseAlarmTest, OfMeansThatACovariateAdjusts) {
  EXPECT_LE(FalseAlarms({}, 6, WithCovariate(.3, .3, 0), Alarm(kMean)), kAlpha);
}

TEST(FalseAlarmTest, OfTheSequenceOfAPlan) {
  const AnalysisOptions tuned = {.tau = std::sqrt(TightestSpread(kAlpha) * 4 / 2000)};
  EXPECT_LE(FalseAlarms({}, 7, Singles(.5, Exponential), Alarm(tuned)), kAlpha);
}

// The test of the tests: what does not hold alpha is seen not to.
TEST(FalseAlarmTest, PlainTestsAlarmInEveryFourthOfTheseExperiments) {
  EXPECT_THAT(FalseAlarms({}, 1, Singles(.5, Exponential), FixedHorizonAlarm),
              AllOf(Gt(.20), Lt(.28)));
}

TEST(FalseAlarmTest, UnitsThatReturnAreNotManyUnits) {
  const auto draw = [](Random& random, double taste) { return 20 * taste + random.Exponential(); };
  const Traffic traffic = {.observations = 4000};
  EXPECT_GT(FalseAlarms(traffic, 8, Returning(.5, true, draw), Alarm(kMean), "blind"), 2 * kAlpha);
  EXPECT_LE(FalseAlarms(traffic, 8, Returning(.5, false, draw), Alarm(kMean)), kAlpha);
}

TEST(FalseAlarmTest, WindowsOfALoadThatDriftsAreNotManyRequests) {
  const Traffic traffic = {.observations = 4000};
  EXPECT_GT(FalseAlarms(traffic, 13, InWindows({.is_blind = true}), Alarm(kMean), "blind"),
            2 * kAlpha);
  EXPECT_LE(FalseAlarms(traffic, 13, InWindows({}), Alarm(kMean)), kAlpha);
}

TEST(FalseAlarmTest, OfTheOutputOfWindows) {
  EXPECT_LE(FalseAlarms({.observations = 600}, 14, InWindows({.is_output = true}), Alarm(kMean)),
            kAlpha);
}

// Why windows are dealt each by itself: what comes back meets arms that take turns.
TEST(FalseAlarmTest, WindowsThatTakeTurnsMeetTheRhythmOfTheLoad) {
  const double alarms = ShareEnded(kExperiments / 20, {.observations = 4000}, 15,
                                   InWindows({.alternates = true}), Alarm(kMean));
  Record("alarms", alarms);
  EXPECT_GT(alarms, 5 * kAlpha);
}

TEST(FalseAlarmTest, HasteAlarmsByMistake) {
  EXPECT_GT(
      FalseAlarms({.observations = 2000}, 9, Singles(.1, HeavyLogNormal), HastyAlarm, "hasty"),
      kAlpha);
  EXPECT_LE(FalseAlarms({.observations = 2000}, 9, Singles(.1, HeavyLogNormal), Alarm(kMean)),
            kAlpha);
}

// A server with one queue, first come, first served, at which a request arrives each second on
// average; seconds are counted by arrivals. Service takes .8 s under the control and .6 s under the
// treatment, on average, which makes a mean time of 4 s and of 1.5 s (M/M/1: 1 / (rate of service -
// rate of arrival)).
constexpr double kMeanService[] = {.8, .6};
constexpr double kTrueDifference = 1.5 - 4;

// Requests of a switchback are dealt by windows of so many seconds; 0: each by itself.
struct Sharing {
  double window = 0, wash_out = 0;
};

Comparison CompareOfAQueue(const Sharing& sharing, uint64_t seed) {
  constexpr double kSeconds = 100'000;
  Random random(seed);
  MetricTally tally(2);
  size_t arm = 0;
  double wait = 0;
  int64_t last = -1;
  for (double now = 0; now < kSeconds; now += 1) {
    const auto unit = static_cast<int64_t>(sharing.window > 0 ? now / sharing.window : now);
    if (unit != last) arm = random.Chance(.5);
    last = unit;
    const double service = kMeanService[arm] * random.Exponential();
    const bool analysed = now - static_cast<double>(unit) * sharing.window >= sharing.wash_out;
    if (sharing.window == 0 || analysed) {
      tally.Add(arm, static_cast<uint64_t>(unit), wait + service);
    }
    wait = std::max(0., wait + service - random.Exponential());
  }
  return Compare(tally.sums(), 0, 1, kMean);
}

struct Found {
  double mean = 0;   // of the differences
  double holds = 0;  // the share of intervals that hold the true one
};

Found FoundInAQueue(const Sharing& sharing, uint64_t seed) {
  constexpr int kServers = 100;
  Found found;
  for (int i = 0; i < kServers; ++i) {
    const Comparison comparison = CompareOfAQueue(sharing, seed * 1'000'003 + i);
    found.mean += *comparison.difference / kServers;
    found.holds += comparison.interval.Holds(kTrueDifference) ? 1. / kServers : 0;
  }
  Record("difference", found.mean);
  Record("holds", found.holds);
  return found;
}

TEST(SwitchbackTest, ArmsThatShareAQueueDifferInTheirServiceAlone) {
  const Found shared = FoundInAQueue({}, 16);
  EXPECT_THAT(shared.mean, DoubleNear(.6 - .8, .02));
  EXPECT_EQ(shared.holds, 0);
}

TEST(SwitchbackTest, WindowsFindWhatAnArmDoesToTheServer) {
  const Found windows = FoundInAQueue({.window = 400, .wash_out = 150}, 17);
  EXPECT_THAT(windows.mean, DoubleNear(kTrueDifference, .2));
  EXPECT_GE(windows.holds, 1 - kAlpha);
}

TEST(SwitchbackTest, WithoutAWashOutTheQueueOfTheWindowBeforeHidesIt) {
  const Found mixed = FoundInAQueue({.window = 20}, 18);
  EXPECT_GT(mixed.mean, kTrueDifference / 2);
}

TEST(CoverageTest, OfAnArmsMean) {
  const double missed =
      ShareEnded(kExperiments, {}, 10, Singles(.5, Exponential), Misses(kMean, 1, 1));
  Record("missed", missed);
  EXPECT_LE(missed, kAlpha);
}

TEST(CoverageTest, OfAnArmsShareInUnitsThatReturn) {
  const auto draw = [](Random& random, double taste) {
    return static_cast<double>(random.Chance(taste * taste));
  };
  const double missed =
      ShareEnded(kExperiments, {}, 11, Returning(.5, false, draw), Misses(kProportion, 1, 1. / 3));
  Record("missed", missed);
  EXPECT_LE(missed, kAlpha);
}

TEST(CoverageTest, OfTheLiftOfAMean) {
  const auto draw = [](Random& random, size_t arm) {
    return (arm == 1 ? 1.2 : 1) * random.Exponential();
  };
  const double missed = ShareEnded(kExperiments, {}, 12, Singles(.3, draw), MissesLift(kMean, .2));
  Record("missed", missed);
  EXPECT_LE(missed, kAlpha);
}

struct Rates {
  double control = 0, treatment = 0;
};

// The same as ShareEnded of as many units with one observation of 0 or 1, who are counted in
// crowds.
double ShareEndedOfRates(int experiments, double units, double treatment_share, const Rates& rates,
                         uint64_t seed, const Look& look) {
  using Binomial = std::binomial_distribution<int64_t>;
  int ended = 0;
  for (int experiment = 0; experiment < experiments; ++experiment) {
    Random random(seed * 1'000'003 + experiment);
    int64_t control = 0, treatment = 0, control_ones = 0, treatment_ones = 0;
    for (int i = 0; i < kLooks; ++i) {
      const int64_t more = static_cast<int64_t>(units / kLooks);
      const int64_t treated = Binomial(more, treatment_share)(random);
      treatment += treated;
      control += more - treated;
      treatment_ones += Binomial(treated, rates.treatment)(random);
      control_ones += Binomial(more - treated, rates.control)(random);
      const std::vector<ArmSums> arms = {CountedUnits(control, control_ones),
                                         CountedUnits(treatment, treatment_ones)};
      if (!look({.arms = arms})) continue;
      ++ended;
      break;
    }
  }
  return static_cast<double>(ended) / experiments;
}

struct ProportionCase {
  double rate, treatment_share, units;
};

class ProportionTest : public testing::TestWithParam<ProportionCase> {};

// Some looks are before, some after the asymptotic sequence begins.
INSTANTIATE_TEST_SUITE_P(
    FalseAlarmTest, ProportionTest,
    testing::Values(ProportionCase{.001, .5, 500'000}, ProportionCase{.001, .1, 1'000'000},
                    ProportionCase{.001, .9, 1'000'000}, ProportionCase{.01, .1, 100'000},
                    ProportionCase{.1, .1, 10'000}, ProportionCase{.1, .5, 4'000},
                    ProportionCase{.5, .1, 4'000}, ProportionCase{.5, .5, 2'000}));

TEST_P(ProportionTest, HoldsAlpha) {
  const auto [rate, share, units] = GetParam();
  const Rates rates = {.control = rate, .treatment = rate};
  const double alarms =
      ShareEndedOfRates(kExperiments, units, share, rates, 20, Alarm(kProportion));
  Record("alarms", alarms);
  EXPECT_LE(alarms, kAlpha);
}

TEST_P(ProportionTest, HoldsTheArmsShare) {
  const auto [rate, share, units] = GetParam();
  const Rates rates = {.control = rate, .treatment = rate};
  const double missed =
      ShareEndedOfRates(kExperiments / 4, units, share, rates, 21, Misses(kProportion, 1, rate));
  Record("missed", missed);
  EXPECT_LE(missed, kAlpha);
}

TEST(RareProportionTest, HasteAlarmsByMistake) {
  // About ten ones in the smaller arm in the end, half a one at the first look.
  const Rates rates = {.control = .001, .treatment = .001};
  const double hasty = ShareEndedOfRates(kExperiments, 100'000, .1, rates, 22, HastyAlarm);
  const double alarms = ShareEndedOfRates(kExperiments, 100'000, .1, rates, 22, Alarm(kProportion));
  Record("hasty", hasty);
  Record("alarms", alarms);
  EXPECT_GT(hasty, 2 * kAlpha);
  EXPECT_LE(alarms, kAlpha);
}

// Skewness weighs most far out, on one side, in the smaller arm: at 1 % and half of it.
TEST(RareProportionTest, SequencesHoldEachHalfOfAlphaFromTheirGateOn) {
  const Rates rates = {.control = .03, .treatment = .03};
  const auto low = [](double effective_units) -> Look {
    return [=](const MetricSums& sums) {
      return RadiiFrom({.effective_units = effective_units, .alpha = .01}, sums) < -1;
    };
  };
  const auto alarms = [&](double effective_units) {
    return ShareEndedOfRates(kExperiments, 20'000, .1, rates, 26, low(effective_units));
  };
  const double early = alarms(kLeastEffectiveUnits / 5), gate = alarms(kLeastEffectiveUnits);
  Record("early", early);
  Record("gate", gate);
  EXPECT_GT(early, .005 - Slack(.005, kExperiments));
  EXPECT_LE(gate, .005 + Slack(.005, kExperiments));
}

TEST(RareProportionTest, TheLiftOfARareRateIsHeld) {
  const double missed =
      ShareEndedOfRates(kExperiments / 4, 200'000, .3, {.control = .001, .treatment = .002}, 23,
                        MissesLift(kProportion, 1));
  Record("missed", missed);
  EXPECT_LE(missed, kAlpha);
}

TEST(RareProportionTest, GuardrailsStopWhatFailsAndSparesWhatDoesNot) {
  const auto stops = [](const MetricSums& sums) {
    return JudgeGuardrail(Compare(sums, 0, 1, kProportion), Better::kLower, .005) ==
           Verdict::kBreached;
  };
  const double at_the_margin = ShareEndedOfRates(kExperiments / 4, 40'000, .5,
                                                 {.control = .001, .treatment = .006}, 24, stops);
  const double beyond = ShareEndedOfRates(kExperiments / 4, 40'000, .5,
                                          {.control = .001, .treatment = .02}, 25, stops);
  Record("at_the_margin", at_the_margin);
  Record("beyond", beyond);
  EXPECT_LE(at_the_margin, kAlpha / 2);
  EXPECT_GT(beyond, .99);
}

// The power that was planned, and the share of experiments of the plan's size that find the effect.
void ExpectPower(const UnitPlan& plan, double measured) {
  Record("planned", plan.power);
  Record("measured", measured);
  testing::Test::RecordProperty("units", std::to_string(plan.units));
  EXPECT_THAT(measured, DoubleNear(plan.power, .05 + Slack(.8, kPowerExperiments)));
}

// A multiple of the number of looks, that the last is at the end.
int Whole(int64_t units) { return static_cast<int>((units + kLooks - 1) / kLooks * kLooks); }

TEST(PowerTest, OfAMean) {
  const UnitPlan plan = *PlanUnits({.sd = 1}, .15, {});
  const auto draw = [](Random& random, size_t arm) {
    return random.Exponential() + (arm == 1 ? .15 : 0);
  };
  ExpectPower(plan, ShareEnded(kPowerExperiments, {.observations = Whole(plan.units)}, 30,
                               Singles(.5, draw), Alarm(kMean)));
}

// One that shows as soon as there is anything to say: chance deals one of the arms fewer units.
TEST(PowerTest, OfAnEffectThatIsLarge) {
  const UnitPlan plan = *PlanUnits({.sd = 1}, 1, {});
  const auto draw = [](Random& random, size_t arm) { return random.Normal() + (arm == 1 ? 1 : 0); };
  ExpectPower(plan, ShareEnded(kPowerExperiments, {.observations = static_cast<int>(plan.units)},
                               37, Singles(.5, draw), Alarm(kMean)));
}

TEST(PowerTest, OfAMeanInUnequalArmsByThePlansTau) {
  const Design design = {
      .power = .9, .control_share = .8, .treatment_share = .2, .tuning = Tuning::kLastLook};
  const UnitPlan plan = *PlanUnits({.sd = 1}, .1, design);
  const auto draw = [](Random& random, size_t arm) {
    return random.Normal() + (arm == 1 ? .1 : 0);
  };
  ExpectPower(plan, ShareEnded(kPowerExperiments, {.observations = Whole(plan.units)}, 31,
                               Singles(.2, draw), Alarm({.tau = plan.tau})));
}

TEST(PowerTest, OfAMeanThatACovariateAdjusts) {
  const Design design = {.covariate_r2 = .5, .tuning = Tuning::kLastLook};
  const UnitPlan plan = *PlanUnits({.sd = std::sqrt(2)}, .2, design);
  const Traffic traffic = {.observations = Whole(plan.units)};
  const AnalysisOptions options = {.tau = plan.tau};
  ExpectPower(plan,
              ShareEnded(kPowerExperiments, traffic, 32, WithCovariate(.5, 0, .2), Alarm(options)));
  // Without it as many units find less.
  const auto draw = [](Random& random, size_t arm) {
    return random.Exponential() + random.Exponential() + (arm == 1 ? .2 : 0);
  };
  EXPECT_LT(ShareEnded(kPowerExperiments, traffic, 33, Singles(.5, draw), Alarm(options)),
            plan.power - .2);
}

TEST(PowerTest, OfAProportion) {
  const UnitPlan plan = *PlanUnits({.kind = MetricKind::kProportion, .rate = .1}, .03, {});
  ExpectPower(plan, ShareEndedOfRates(kPowerExperiments, Whole(plan.units), .5,
                                      {.control = .1, .treatment = .13}, 34, Alarm(kProportion)));
}

TEST(PowerTest, OfARareProportion) {
  const Design design = {.control_share = .9, .treatment_share = .1};
  const UnitPlan plan = *PlanUnits({.kind = MetricKind::kProportion, .rate = .002}, .003, design);
  ExpectPower(plan,
              ShareEndedOfRates(kPowerExperiments, Whole(plan.units), .1,
                                {.control = .002, .treatment = .005}, 35, Alarm(kProportion)));
}

TEST(PowerTest, OfTheLeastEffect) {
  const DetectableEffects effects =
      *PlanEffects({.kind = MetricKind::kProportion, .rate = .3}, 6000, {});
  const UnitPlan plan = {.units = 6000, .power = .8};
  ExpectPower(plan, ShareEndedOfRates(kPowerExperiments, 6000, .5,
                                      {.control = .3, .treatment = .3 + *effects.down}, 36,
                                      Alarm(kProportion)));
}

// Units of each arm, of `weights`; of the last arm a share `loss` is lost.
std::vector<int64_t> Deal(int64_t units, const std::vector<double>& weights, double loss,
                          Random& random) {
  double left = -loss * weights.back();
  for (double weight : weights) left += weight;
  std::vector<int64_t> dealt;
  for (size_t arm = 0; arm + 1 < weights.size(); ++arm) {
    dealt.push_back(
        std::binomial_distribution<int64_t>(units, std::min(1., weights[arm] / left))(random));
    units -= dealt.back();
    left -= weights[arm];
  }
  dealt.push_back(units);
  return dealt;
}

std::vector<double> SampleRatioPValues(int experiments, int64_t units,
                                       const std::vector<double>& weights, double loss,
                                       uint64_t seed) {
  Random random(seed);
  std::vector<double> ps;
  for (int i = 0; i < experiments; ++i) {
    ps.push_back(CheckSampleRatio(Deal(units, weights, loss, random), weights).p_value);
  }
  std::sort(ps.begin(), ps.end());
  return ps;
}

double ShareOfAlarms(const std::vector<double>& ps) {
  return static_cast<double>(std::lower_bound(ps.begin(), ps.end(), kSampleRatioAlarm) -
                             ps.begin()) /
         static_cast<double>(ps.size());
}

// How far the distribution of sorted p-values is above that of the uniform (Kolmogorov, Smirnov),
// and below.
struct Distance {
  double above = 0, below = 0;
};

Distance FromUniform(const std::vector<double>& ps) {
  const double n = static_cast<double>(ps.size());
  Distance distance;
  for (size_t i = 0; i < ps.size(); ++i) {
    distance.above = std::max(distance.above, (static_cast<double>(i) + 1) / n - ps[i]);
    distance.below = std::max(distance.below, ps[i] - static_cast<double>(i) / n);
  }
  return distance;
}

// 1.63 / sqrt(n): passed once in a hundred.
double KolmogorovBound(size_t n) { return 1.63 / std::sqrt(static_cast<double>(n)); }

TEST(SampleRatioSimulationTest, PValuesAreUniformWhereNothingIsWrong) {
  for (const std::vector<double>& weights : {std::vector<double>{.5, .5}, {.9, .1}, {2, 1, 1}}) {
    const std::vector<double> ps = SampleRatioPValues(kExperiments, 1'000'000, weights, 0, 40);
    // Counts are whole: of a binomial one, of standard deviation s, p takes steps of up to .8 / s.
    const double step = .8 / std::sqrt(1e6 * .09);
    const Distance distance = FromUniform(ps);
    EXPECT_LT(std::max(distance.above, distance.below), KolmogorovBound(ps.size()) + step);
    EXPECT_LT(ShareOfAlarms(ps), .002 + Slack(.001, kExperiments));
  }
}

TEST(SampleRatioSimulationTest, PValuesOfFewUnitsAreNeverTooSmall) {
  for (const std::vector<double>& weights : {std::vector<double>{.5, .5}, {.95, .05}, {8, 1, 1}}) {
    const std::vector<double> ps = SampleRatioPValues(kExperiments, 60, weights, 0, 41);
    EXPECT_LT(FromUniform(ps).above, KolmogorovBound(ps.size()));
    EXPECT_LE(ShareOfAlarms(ps), .002 + Slack(.001, kExperiments));
  }
}

TEST(SampleRatioSimulationTest, ALossOfOnePercentAlarmsAtThePlansSize) {
  for (const std::vector<double>& weights : {std::vector<double>{.5, .5}, {.9, .1}, {2, 1, 1}}) {
    const int64_t units = *PlanSampleRatioUnits(weights, weights.size() - 1, .01, .8);
    const double alarms =
        ShareOfAlarms(SampleRatioPValues(kPowerExperiments, units, weights, .01, 42));
    Record(weights.size() == 3 ? "three" : weights[0] == .5 ? "equal" : "unequal", alarms);
    EXPECT_THAT(alarms, DoubleNear(.8, .05 + Slack(.8, kPowerExperiments)));
  }
}

}  // namespace experiment_simulation_test
}  // namespace epikv
