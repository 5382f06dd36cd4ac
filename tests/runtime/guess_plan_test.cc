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

constexpr int64_t kRoom = 1000;  // rows

// A step takes 10 ms and .1 for each row; the draft takes 1.
int64_t Depth(const std::vector<double>& chances, int64_t decoding,
              absl::Duration guess_time = absl::Milliseconds(1)) {
  return PlanDrafts(chances, decoding, decoding, 15, kRoom, guess_time, Measured(10, 0.1));
}

TEST(PlanDrafts, GoAsFarAsTheyPay) {
  EXPECT_EQ(Depth({0.98}, 1), 15);
  EXPECT_EQ(Depth({0.02}, 1), 0);
  const int64_t some = Depth({0.7}, 1);
  EXPECT_GT(some, 2);
  EXPECT_LT(some, 8);
  EXPECT_LT(Depth({0.7}, 1, absl::Milliseconds(4)), some) << "a dearer draft";
  EXPECT_EQ(Depth({0.7}, 1, absl::Seconds(1)), 0);
}

TEST(PlanDrafts, AFewOfManyThatDecodeDraftLess) {
  EXPECT_LT(Depth({0.9}, 16), Depth({0.9}, 1));
  EXPECT_GT(Depth(std::vector<double>(16, 0.9), 16), Depth({0.9}, 16));
}

TEST(PlanDrafts, WhoDraftsNothingWaitsATenthLongerAtMost) {
  const StepCost cost = Measured(10, 0.1);
  const int64_t depth = PlanDrafts({{0.98}}, 4, 4, 15, kRoom, absl::Milliseconds(0.2), cost);
  EXPECT_GE(depth, 1);
  EXPECT_LE(static_cast<double>(depth) * 0.3, 0.1 * 10.4 + 0.01);
}

TEST(PlanDrafts, NoMoreIsDraftedThanTheStepHasRoomFor) {
  const StepCost cost = Measured(10, 0.1);
  const std::vector<double> chances(4, 0.95);
  EXPECT_EQ(PlanDrafts(chances, 4, 4, 15, 11, absl::Milliseconds(1), cost), 2);
  EXPECT_EQ(PlanDrafts(chances, 4, 4, 15, 3, absl::Milliseconds(1), cost), 0);
}

// Of all depths it is the one that gives most tokens a second.
TEST(PlanDrafts, NoOtherDepthGivesMore) {
  for (const double chance : {0.1, 0.3, 0.5, 0.7, 0.9}) {
    for (const double draft : {0.2, 1.0, 3.0}) {
      auto speed = [&](int64_t depth) {
        double tokens = 1, time = 10.1, alive = 1;
        for (int64_t i = 0; i < depth; ++i) {
          tokens += alive *= chance;
          time += draft + 0.1;
        }
        return tokens / time;
      };
      const double ours = speed(Depth({chance}, 1, absl::Milliseconds(1) * draft));
      for (int64_t depth = 0; depth <= 15; ++depth) EXPECT_LE(speed(depth), ours * 1.002);
    }
  }
}

TEST(PlanDrafts, BeforeAnythingWasMeasuredAFewAreTried) {
  const int64_t depth = PlanDrafts({{0.6}}, 1, 1, 15, kRoom, absl::ZeroDuration(), StepCost());
  EXPECT_GE(depth, 2);
  EXPECT_LE(depth, 8);
}

}  // namespace guess_plan_test
}  // namespace epikv
