#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "server/experiments/figures/comparison.h"
#include "server/experiments/figures/metric_tally.h"
#include "tests/fixtures/simulated_experiments.h"

// What is promised of pairs, counted in experiments that are made up, whose truth is known; and how
// many units they save beside a split in which every answer is replayed.

namespace epikv {
namespace pair_simulation_test {

constexpr int kUnits = 2000;
constexpr int kTrials = kExperiments / 10;

// Shadow KL of both arms' answers to one prompt. Prompts differ; so do answers to one prompt.
struct Answers {
  double control = 0, arm = 0;
};
struct World {
  double control = 1, arm = 1;  // means over prompts of one difficulty
  double prompts = .5;          // sd of the logarithm of a prompt's difficulty
};

Answers Draw(const World& world, Random& random) {
  const double difficulty = std::exp(world.prompts * random.Normal());
  // The mean of four exponential ones: of an answer's parts.
  const auto answer = [&](double mean) {
    double sum = 0;
    for (int i = 0; i < 4; ++i) sum += random.Exponential();
    return mean * difficulty * sum / 4;
  };
  return {.control = answer(world.control), .arm = answer(world.arm)};
}

double Effect(const World& world) {
  return (world.arm - world.control) * std::exp(world.prompts * world.prompts / 2);
}

// Shares of experiments in which, at any of kLooks looks:
struct Said {
  double missed = 0;  // the interval left out the truth
  double found = 0;   // it left out 0
};

Said Simulate(const World& world, uint64_t seed) {
  Said said;
  for (int i = 0; i < kTrials; ++i) {
    Random random(seed * 1'000'003 + static_cast<uint64_t>(i));
    MetricTally differences(1);
    bool missed = false, found = false;
    for (int unit = 1; unit <= kUnits; ++unit) {
      const Answers drawn = Draw(world, random);
      differences.Add(0, static_cast<uint64_t>(unit), drawn.arm - drawn.control);
      if (unit % (kUnits / kLooks) != 0) continue;
      const Interval interval = ComparePairs(differences.sums(), kAlpha).interval;
      missed |= !interval.Holds(Effect(world));
      found |= !interval.Holds(0);
    }
    said.missed += missed;
    said.found += found;
  }
  said.missed /= kTrials;
  said.found /= kTrials;
  Record("missed", said.missed);
  Record("found", said.found);
  return said;
}

TEST(PairSimulationTest, WhereNothingDiffersNothingIsFound) {
  const Said said = Simulate({}, 1);
  EXPECT_LE(said.missed, kAlpha + Slack(kAlpha, kTrials));
  EXPECT_EQ(said.missed, said.found);
}

TEST(PairSimulationTest, IntervalsHoldTheTruthWhereTheControlHasTheFullCache) {
  const Said said = Simulate({.control = 0}, 2);
  EXPECT_LE(said.missed, kAlpha + Slack(kAlpha, kTrials));
  EXPECT_GE(said.found, .99);
}

// All differences are of one sign, and a few prompts have most of the sum.
TEST(PairSimulationTest, IntervalsHoldTheTruthWherePromptsDifferMuch) {
  const Said said = Simulate({.control = 0, .prompts = 1}, 3);
  EXPECT_LE(said.missed, kAlpha + Slack(kAlpha, kTrials));
  EXPECT_GE(said.found, .5);
}

// Units after which a difference is found, in a half of the experiments; one look each 20 units.
struct Needed {
  int pairs = 0, split = 0;
};

Needed MedianUnits(const World& world, uint64_t seed) {
  constexpr int kMost = 20'000, kLookEvery = 20;
  constexpr int kFewTrials = 200 / (kFewer > 1 ? 4 : 1);
  std::vector<int> of_pairs, of_split;
  for (int i = 0; i < kFewTrials; ++i) {
    Random random(seed * 1'000'003 + static_cast<uint64_t>(i));
    MetricTally differences(1), split(2);
    int pairs = 0, both = 0;
    for (int unit = 1; unit <= kMost && (pairs == 0 || both == 0); ++unit) {
      const Answers drawn = Draw(world, random);
      const size_t arm = random() % 2;
      differences.Add(0, static_cast<uint64_t>(unit), drawn.arm - drawn.control);
      split.Add(arm, static_cast<uint64_t>(unit), arm == 0 ? drawn.control : drawn.arm);
      if (unit % kLookEvery != 0) continue;
      if (pairs == 0 && !ComparePairs(differences.sums(), kAlpha).interval.Holds(0)) pairs = unit;
      if (both == 0 && !Compare(split.sums(), 0, 1, {.alpha = kAlpha}).interval.Holds(0)) {
        both = unit;
      }
    }
    of_pairs.push_back(pairs == 0 ? kMost : pairs);
    of_split.push_back(both == 0 ? kMost : both);
  }
  const auto median = [](std::vector<int>& units) {
    const auto middle = units.begin() + static_cast<ptrdiff_t>(units.size() / 2);
    std::nth_element(units.begin(), middle, units.end());
    return *middle;
  };
  const Needed needed{.pairs = median(of_pairs), .split = median(of_split)};
  Record("pairs", needed.pairs);
  Record("split", needed.split);
  return needed;
}

TEST(PairSimulationTest, WherePromptsDifferASplitNeedsThriceTheUnits) {
  const Needed needed = MedianUnits({.arm = 1.2}, 4);
  EXPECT_LT(needed.pairs, needed.split / 2);
}

TEST(PairSimulationTest, WherePromptsAreAlikeASplitStillNeedsMore) {
  const Needed needed = MedianUnits({.arm = 1.2, .prompts = 0}, 5);
  EXPECT_LT(needed.pairs, needed.split / 2);
}

}  // namespace pair_simulation_test
}  // namespace epikv
