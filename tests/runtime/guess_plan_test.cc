#include "runtime/engine/guess_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace epikv {
namespace guess_plan_test {

using ::testing::ElementsAre;

// Steps of a time that is a line over their rows.
StepCost Measured(double base_ms, double row_ms, int64_t from = 1, int64_t to = 32) {
  StepCost cost;
  for (int round = 0; round < 40; ++round) {
    for (int64_t rows = from; rows <= to; ++rows) {
      cost.OnStep(rows, absl::Milliseconds(base_ms + row_ms * static_cast<double>(rows)));
    }
  }
  return cost;
}

TEST(StepCost, FindsWhatARowAdds) {
  const StepCost cost = Measured(10, 0.5);
  EXPECT_NEAR(cost.ShareOfRow(1), 0.5 / 10.5, 0.002);
  EXPECT_NEAR(cost.ShareOfRow(20), 0.5 / 20, 0.002);
}

TEST(StepCost, FindsItInNoise) {
  StepCost cost;
  std::mt19937 dice(3);
  std::uniform_real_distribution<double> noise(0.8, 1.3);
  for (int i = 0; i < 2000; ++i) {
    const auto rows = static_cast<int64_t>(1 + dice() % 16);
    cost.OnStep(rows, absl::Milliseconds((10 + 2 * static_cast<double>(rows)) * noise(dice)));
  }
  EXPECT_NEAR(cost.ShareOfRow(8), 2. / 26, 0.02);
}

TEST(StepCost, BeforeAnythingWasMeasuredARowIsCheap) {
  EXPECT_NEAR(StepCost().ShareOfRow(1), 0.03, 1e-9);
  EXPECT_NEAR(Measured(10, 1, 4, 4).ShareOfRow(4), 0.03, 0.005) << "all had as many rows";
}

TEST(StepCost, AProcessThatStoodStillSaysNothingOfRows) {
  StepCost cost = Measured(10, 1);
  const double share = cost.ShareOfRow(8);
  cost.OnStep(16, absl::Seconds(60));
  cost.OnStep(1, absl::Seconds(60));
  EXPECT_NEAR(cost.ShareOfRow(8), share, share / 2);
  // Nor where it is all that is known of other numbers of rows.
  cost = Measured(10, 1, 4, 4);
  cost.OnStep(1, absl::Seconds(60));
  EXPECT_GE(cost.ShareOfRow(4), 0.005) << "rows are never free";
}

TEST(GuessRecord, BeginsWithWhatIsKnownOfOthers) {
  EXPECT_EQ(GuessRecord(0.2).chance(), 0.2);
  EXPECT_EQ(GuessRecord().chance(), GuessRecord::kUnknown);
}

TEST(GuessRecord, FollowsWhatComesTrue) {
  GuessRecord record;
  for (int i = 0; i < 60; ++i) record.OnVerified(8, 8);
  EXPECT_GT(record.chance(), 0.95);
  for (int i = 0; i < 60; ++i) record.OnVerified(8, 0);
  EXPECT_LT(record.chance(), 0.05);
  const double low = record.chance();
  for (int i = 0; i < 100; ++i) record.OnLeftOut();
  EXPECT_GT(record.chance(), low + 0.1);
  EXPECT_LT(record.chance(), 0.6);
}

TEST(GuessRecord, OnlyThoseThatWereReachedCount) {
  GuessRecord one, many;
  one.OnVerified(1, 0);
  many.OnVerified(15, 0);
  EXPECT_EQ(one.chance(), many.chance());
}

TEST(PlanGuesses, OneStreamTakesWhatMayCome) {
  const StepCost cost = Measured(10, 0.1);
  EXPECT_THAT(PlanGuesses({{{.count = 8, .chance = 0.9}}}, 1, 1, 100, cost), ElementsAre(8));
  EXPECT_THAT(PlanGuesses({{{.count = 8, .chance = 0.3}}}, 1, 1, 100, cost), ElementsAre(3));
  EXPECT_THAT(PlanGuesses({{{.count = 0, .chance = 0.9}}}, 1, 1, 100, cost), ElementsAre(0));
  EXPECT_THAT(PlanGuesses({{{.count = 8, .chance = 0.9}}}, 1, 1, 3, cost), ElementsAre(3));
}

TEST(PlanGuesses, WhereRowsCostAsMuchAsTokensNoneIsTaken) {
  const StepCost cost = Measured(0.5, 10);
  EXPECT_THAT(PlanGuesses({{{.count = 8, .chance = 0.9}}}, 1, 1, 100, cost), ElementsAre(0));
}

TEST(PlanGuesses, RowsGoToTheSequencesThatGuessWell) {
  const StepCost cost = Measured(10, 0.2);
  const std::vector<Guesses> guesses = {
      {.count = 8, .chance = 0.05}, {.count = 8, .chance = 0.95}, {.count = 8, .chance = 0.5}};
  const std::vector<int64_t> taken = PlanGuesses(guesses, 3, 3, 100, cost);
  EXPECT_EQ(taken[0], 0);
  EXPECT_EQ(taken[1], 8);
  EXPECT_GE(taken[2], 1);
  EXPECT_LT(taken[2], 8);
}

TEST(PlanGuesses, WhoGuessesNothingWaitsATenthLongerAtMost) {
  const StepCost cost = Measured(10, 0.5);
  std::vector<Guesses> guesses(4);
  guesses[2] = {.count = 15, .chance = 0.98};
  const int64_t taken = PlanGuesses(guesses, 4, 4, 100, cost)[2];
  EXPECT_GE(taken, 1);
  EXPECT_LE(static_cast<double>(taken) * 0.5, 0.1 * (10 + 4 * 0.5) + 0.01);
  EXPECT_EQ(PlanGuesses({{guesses[2]}}, 1, 1, 100, cost)[0], 15) << "it is alone";
}

// What it takes is what gives most tokens a second, of all that could be taken.
TEST(PlanGuesses, NoOtherChoiceGivesMore) {
  std::mt19937 dice(11);
  std::uniform_real_distribution<double> chance(0.02, 0.98);
  for (int round = 0; round < 50; ++round) {
    const double row = 0.05 + 0.5 * chance(dice);
    const StepCost cost = Measured(10, row);
    const std::vector<Guesses> guesses = {{.count = 4, .chance = chance(dice)},
                                          {.count = 4, .chance = chance(dice)}};
    auto speed = [&](int64_t first, int64_t second) {
      double tokens = 2, time = 10 + 2 * row;
      const int64_t counts[] = {first, second};
      for (size_t i = 0; i < 2; ++i) {
        double alive = 1;
        for (int64_t j = 0; j < counts[i]; ++j) {
          alive *= guesses[i].chance;
          tokens += alive;
          time += row;
        }
      }
      return tokens / time;
    };
    const std::vector<int64_t> taken = PlanGuesses(guesses, 2, 2, 100, cost);
    const double ours = speed(taken[0], taken[1]);
    for (int64_t first = 0; first <= 4; ++first) {
      for (int64_t second = 0; second <= 4; ++second) {
        EXPECT_LE(speed(first, second), ours * 1.001) << first << ", " << second;
      }
    }
  }
}

}  // namespace guess_plan_test
}  // namespace epikv
