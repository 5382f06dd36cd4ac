#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "server/experiments/figures/comparison.h"
#include "server/experiments/figures/confidence_sequence.h"
#include "server/experiments/figures/metric_tally.h"
#include "tests/fixtures/simulated_experiments.h"

// What is promised of subgroups, counted in experiments that are made up, whose truth is known.

namespace epikv {
namespace subgroup_simulation_test {

constexpr int kArms = 3;     // the first is the control
constexpr int kClasses = 3;  // of each of two divisions
constexpr int kUnits = 6000;
constexpr int kTrials = kExperiments / 10;

// What is true of a class of the first division; of the second, all are alike.
struct Class {
  double share = 0;
  double mean = 0, sd = 1;
  std::array<double, kArms> effects = {};
};

struct World {
  std::array<Class, kClasses> classes;
  bool is_rate = false;  // values are 0 or 1, with this mean
};

const World kNothing = {.classes = {{{.share = .6, .mean = 1, .sd = 1},
                                     {.share = .3, .mean = 3, .sd = 3},
                                     {.share = .1, .mean = 9, .sd = 6}}}};

World WithEffects(World world, const std::array<double, kClasses>& of_the_last_arm) {
  for (int i = 0; i < kClasses; ++i) world.classes[i].effects = {0, 0, of_the_last_arm[i]};
  return world;
}

// An experiment as it grows.
class Trial {
 public:
  Trial(const World& world, uint64_t seed)
      : world_(world),
        random_(seed),
        everyone_(kArms),
        first_(kClasses, MetricTally(kArms)),
        second_(kClasses, MetricTally(kArms)) {}

  void Add() {
    const size_t arm = random_() % kArms;
    const size_t place = Place({world_.classes[0].share, world_.classes[1].share});
    const Class& drawn = world_.classes[place];
    const double mean = drawn.mean + drawn.effects[arm];
    const double value = world_.is_rate ? static_cast<double>(random_.Chance(mean))
                                        : mean + drawn.sd * (random_.Exponential() - 1);
    const uint64_t unit = units_++;
    everyone_.Add(arm, unit, value);
    first_[place].Add(arm, unit, value);
    second_[Place({.5, .4})].Add(arm, unit, value);
  }

  Comparison Compared(size_t arm) const { return Compare(everyone_.sums(), 0, arm, Options()); }
  Comparison Compared(const MetricTally& subgroup, size_t arm, double alpha) const {
    AnalysisOptions options = Options();
    options.alpha = alpha;
    return Compare(subgroup.sums(), 0, arm, options);
  }
  bool Differs(const std::vector<MetricTally>& division, size_t arm, double alpha) const {
    std::vector<Comparison> comparisons;
    for (const MetricTally& subgroup : division) {
      comparisons.push_back(Compared(subgroup, arm, alpha));
    }
    return CompareSubgroups(comparisons, Compared(arm).tau_squared).p_value < alpha;
  }
  const std::vector<MetricTally>& first() const { return first_; }
  const std::vector<MetricTally>& second() const { return second_; }

 private:
  AnalysisOptions Options() const {
    return {.kind = world_.is_rate ? MetricKind::kProportion : MetricKind::kMean};
  }
  size_t Place(const std::array<double, 2>& shares) {
    const double drawn = random_.Uniform();
    return drawn < shares[0] ? 0 : drawn < shares[0] + shares[1] ? 1 : 2;
  }

  const World& world_;
  Random random_;
  uint64_t units_ = 0;
  MetricTally everyone_;
  std::vector<MetricTally> first_, second_;
};

// Shares of experiments in which, at any look:
struct Said {
  double missed = 0;           // an interval of any subgroup left out the truth
  double in_one = 0;           // the last arm's left out 0 in one class of the first division alone
  double differs = 0;          // the last arm was said to differ between these classes
  double falsely_differs = 0;  // anything else was said to differ
};

const SubgroupAlphas kShared =
    AlphaPerSubgroup(kAlpha, {.arms = kArms, .divisions = 2, .classes = 2 * kClasses});

bool Misses(const Trial& trial, const World& world, double alpha) {
  for (size_t arm = 1; arm < kArms; ++arm) {
    double mean_effect = 0;
    for (int i = 0; i < kClasses; ++i) {
      const Class& drawn = world.classes[i];
      mean_effect += drawn.share * drawn.effects[arm];
      if (!trial.Compared(trial.first()[i], arm, alpha).interval.Holds(drawn.effects[arm]))
        return true;
    }
    for (const MetricTally& subgroup : trial.second()) {
      if (!trial.Compared(subgroup, arm, alpha).interval.Holds(mean_effect)) return true;
    }
  }
  return false;
}

bool SeenInOneOnly(const Trial& trial, double alpha) {
  int seen = 0, unseen = 0;
  for (const MetricTally& subgroup : trial.first()) {
    const Comparison comparison = trial.Compared(subgroup, kArms - 1, alpha);
    if (comparison.basis == Basis::kTooEarly) continue;
    ++(comparison.interval.Holds(0) ? unseen : seen);
  }
  return seen > 0 && unseen > 0;
}

Said Simulate(const World& world, uint64_t seed) {
  Said said;
  for (int i = 0; i < kTrials; ++i) {
    Trial trial(world, seed * 1'000'003 + static_cast<uint64_t>(i));
    bool missed = false, in_one = false, differs = false, falsely = false;
    for (int look = 0; look < kLooks; ++look) {
      for (int unit = 0; unit < kUnits / kLooks; ++unit) trial.Add();
      missed |= Misses(trial, world, kShared.interval);
      in_one |= SeenInOneOnly(trial, kShared.interval);
      differs |= trial.Differs(trial.first(), 2, kShared.heterogeneity);
      falsely |= trial.Differs(trial.first(), 1, kShared.heterogeneity) ||
                 trial.Differs(trial.second(), 1, kShared.heterogeneity) ||
                 trial.Differs(trial.second(), 2, kShared.heterogeneity);
    }
    said.missed += missed;
    said.in_one += in_one;
    said.differs += differs;
    said.falsely_differs += falsely;
  }
  for (double* sum : {&said.missed, &said.in_one, &said.differs, &said.falsely_differs}) {
    *sum /= kTrials;
  }
  Record("missed", said.missed);
  Record("in_one", said.in_one);
  Record("differs", said.differs);
  Record("falsely_differs", said.falsely_differs);
  return said;
}

TEST(SubgroupSimulationTest, WhereNothingDiffersNothingIsSaid) {
  const Said said = Simulate(kNothing, 1);
  EXPECT_LE(said.missed, kAlpha);
  EXPECT_LE(said.differs + said.falsely_differs, kAlpha);
}

// A verdict in one subgroup and none in another says nothing of a difference between them.
TEST(SubgroupSimulationTest, TheSameEffectIsOftenSeenInOneClassAloneAndNotSaidToDiffer) {
  const Said said = Simulate(WithEffects(kNothing, {.3, .3, .3}), 2);
  EXPECT_GT(said.in_one, .9);
  EXPECT_LE(said.missed, kAlpha);
  EXPECT_LE(said.differs + said.falsely_differs, kAlpha);
}

TEST(SubgroupSimulationTest, AnEffectOfOneClassIsSaidToDiffer) {
  const Said said = Simulate(WithEffects(kNothing, {.4, -.4, 0}), 3);
  EXPECT_LE(said.missed, kAlpha);
  EXPECT_LE(said.falsely_differs, kAlpha);
  EXPECT_GE(said.differs, .8);
}

// The test of the test, as one who slices and looks: plain 95 % intervals of each subgroup.
TEST(SubgroupSimulationTest, PlainIntervalsOfSubgroupsFindSomethingInMostExperiments) {
  double alarms = 0;
  for (int i = 0; i < kTrials; ++i) {
    Trial trial(kNothing, 1'000'003 + static_cast<uint64_t>(i));
    bool alarm = false;
    for (int look = 0; look < kLooks && !alarm; ++look) {
      for (int unit = 0; unit < kUnits / kLooks; ++unit) trial.Add();
      for (const auto* division : {&trial.first(), &trial.second()}) {
        for (const MetricTally& subgroup : *division) {
          const Comparison found = trial.Compared(subgroup, 2, kAlpha);
          if (found.basis != Basis::kAsymptotic) continue;
          alarm |= std::abs(*found.difference) > 1.959964 * std::sqrt(found.variance);
        }
      }
    }
    alarms += alarm;
  }
  Record("alarms", alarms / kTrials);
  EXPECT_GT(alarms / kTrials, .5);
}

// The rare class begins with exact sequences.
const World kRates = {
    .classes = {{{.share = .6, .mean = .5}, {.share = .3, .mean = .1}, {.share = .1, .mean = .02}}},
    .is_rate = true};

TEST(SubgroupSimulationTest, OfRatesWhereNothingDiffersNothingIsSaid) {
  const Said said = Simulate(kRates, 4);
  EXPECT_LE(said.missed, kAlpha);
  EXPECT_LE(said.differs + said.falsely_differs, kAlpha);
}

TEST(SubgroupSimulationTest, OfRatesAnEffectOfOneClassIsSaidToDiffer) {
  const Said said = Simulate(WithEffects(kRates, {-.15, .05, 0}), 5);
  EXPECT_LE(said.missed, kAlpha);
  EXPECT_LE(said.falsely_differs, kAlpha);
  EXPECT_GE(said.differs, .8);
}

// Normal estimates that become more precise from look to look, each at its own pace: the sequence
// itself, nearer to its alpha.
TEST(SamenessTest, HoldsAlphaOfNormalEstimates) {
  constexpr double kVariances[] = {1, 4, .2, 30};
  int alarms = 0;
  for (int i = 0; i < kExperiments; ++i) {
    Random random(1'000'003 + static_cast<uint64_t>(i));
    std::array<double, 4> sums = {};
    bool alarm = false;
    for (int n = 1; n <= 1000 && !alarm; ++n) {
      std::vector<Estimated> estimates;
      for (size_t k = 0; k < sums.size(); ++k) {
        sums[k] += 5 + std::sqrt(kVariances[k]) * random.Normal();
        estimates.push_back({.value = sums[k] / n, .variance = kVariances[k] / n});
      }
      alarm = SamenessPValue(estimates, .5) < kAlpha;
    }
    alarms += alarm ? 1 : 0;
  }
  const double share = static_cast<double>(alarms) / kExperiments;
  Record("alarms", share);
  EXPECT_LE(share, kAlpha);
  EXPECT_GE(share, kAlpha / 5) << "it could say more";
}

}  // namespace subgroup_simulation_test
}  // namespace epikv
