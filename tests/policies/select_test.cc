#include "policies/select.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace epikv {
namespace select_test {

using testing::IsEmpty;
using testing::UnorderedElementsAre;

constexpr float kInf = std::numeric_limits<float>::infinity();

// Slots hold tokens 0, 1, 2 ... in order.
std::vector<int32_t> Lowest(std::vector<float> scores, int64_t count, Protection protection = {}) {
  std::vector<int32_t> index;
  for (size_t i = 0; i < scores.size(); ++i) index.push_back(static_cast<int32_t>(i));
  const int64_t newest = index.back();
  auto victims = LowestScores(scores, index, protection, newest, count);
  EXPECT_TRUE(victims.ok()) << victims.status();
  return victims.value_or(std::vector<int32_t>{});
}

TEST(Select, LowestGo) { EXPECT_THAT(Lowest({3, 1, 2, 0}, 2), UnorderedElementsAre(1, 3)); }

TEST(Select, NewerWinsTie) {
  EXPECT_THAT(Lowest({1, 0, 1, 1, 1}, 3), UnorderedElementsAre(1, 0, 2));
}

TEST(Select, NewerWinsTieWhateverTheSlot) {
  const std::vector<float> scores = {5, 5, 5, 5};
  const std::vector<int32_t> index = {30, 10, 40, 20};
  EXPECT_THAT(*LowestScores(scores, index, {}, 40, 2), UnorderedElementsAre(10, 20));
}

TEST(Select, NegativeZeroTiesWithZero) {
  EXPECT_THAT(Lowest({0.0f, -0.0f, 1}, 1), UnorderedElementsAre(0));
}

TEST(Select, ProtectedStay) {
  EXPECT_THAT(Lowest({0, 0, 9, 8, 0, 0}, 2, {.prompt = 2, .recent = 2}),
              UnorderedElementsAre(2, 3));
}

TEST(Select, InfinitiesAreScores) {
  EXPECT_THAT(Lowest({kInf, 0, -kInf}, 2), UnorderedElementsAre(1, 2));
}

TEST(Select, NoneAskedNoneGiven) { EXPECT_THAT(Lowest({1, 2}, 0), IsEmpty()); }

TEST(Select, NanIsAnErrorThatNamesTheToken) {
  const std::vector<float> scores = {1, NAN, 2};
  const std::vector<int32_t> index = {7, 8, 9};
  const absl::Status status = LowestScores(scores, index, {}, 9, 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("token 8"));
}

TEST(Select, NanOfProtectedTokenIsNotRead) {
  EXPECT_THAT(Lowest({NAN, 1, 2, NAN}, 1, {.sinks = 1, .recent = 1}), UnorderedElementsAre(1));
}

TEST(Select, TooFewUnprotectedIsAnError) {
  const std::vector<float> scores = {1, 2, 3};
  const std::vector<int32_t> index = {0, 1, 2};
  EXPECT_EQ(LowestScores(scores, index, {.recent = 2}, 2, 2).status().code(),
            absl::StatusCode::kInternal);
}

// Two lanes that hold tokens 0, 1, 2 ... in order.
std::vector<std::vector<int32_t>> LowestOfTwo(std::vector<float> a, std::vector<float> b,
                                              int64_t count, int64_t floor,
                                              Protection protection = {}) {
  std::vector<int32_t> index;
  for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) index.push_back(i);
  const std::vector<ScoredLane> lanes = {{a, absl::MakeConstSpan(index).first(a.size())},
                                         {b, absl::MakeConstSpan(index).first(b.size())}};
  auto victims = LowestScoresOfPool(lanes, protection, index.back(), count, floor);
  EXPECT_TRUE(victims.ok()) << victims.status();
  return victims.value_or(std::vector<std::vector<int32_t>>(2));
}

TEST(SelectOfPool, TheLowestOfAllLanesGo) {
  EXPECT_THAT(LowestOfTwo({5, 1, 6}, {2, 3, 4}, 3, 0),
              testing::ElementsAre(UnorderedElementsAre(1), UnorderedElementsAre(0, 1)));
}

TEST(SelectOfPool, ALaneKeepsItsFloor) {
  EXPECT_THAT(LowestOfTwo({9, 8, 7, 6}, {1, 2, 3, 4}, 4, 1),
              testing::ElementsAre(UnorderedElementsAre(3), UnorderedElementsAre(0, 1, 2)));
}

TEST(SelectOfPool, TheProtectedCountForTheFloor) {
  // Lane 1 keeps token 3, which is recent, and one more.
  EXPECT_THAT(LowestOfTwo({9, 8, 7, 6}, {1, 3, 2, 0}, 3, 2, {.recent = 1}),
              testing::ElementsAre(UnorderedElementsAre(2), UnorderedElementsAre(0, 2)));
}

TEST(SelectOfPool, NewerWinsTieAndThenTheLaterLane) {
  EXPECT_THAT(LowestOfTwo({1, 1}, {1, 1}, 3, 0),
              testing::ElementsAre(UnorderedElementsAre(0, 1), UnorderedElementsAre(0)));
}

TEST(SelectOfPool, TooFewIsAnError) {
  const std::vector<float> scores = {1, 2};
  const std::vector<int32_t> index = {0, 1};
  const std::vector<ScoredLane> lanes = {{scores, index}, {scores, index}};
  EXPECT_EQ(LowestScoresOfPool(lanes, {}, 1, 3, 1).status().code(), absl::StatusCode::kInternal);
}

// Of two drawn without replacement from masses 1, 2, 3 and 4: the exact probabilities that each
// token stays, by enumeration, against 20,000 draws.
TEST(SelectBelowThreshold, GoBeyondTheCount) {
  const std::vector<float> scores = {5, 1, 4, 2, 3};
  const std::vector<int32_t> index = {0, 1, 2, 3, 4};
  EXPECT_THAT(*LowestScores(scores, index, {}, 4, 1, 3), UnorderedElementsAre(1, 3));
  EXPECT_THAT(*LowestScores(scores, index, {}, 4, 0, 3), UnorderedElementsAre(1, 3));
}

TEST(SelectBelowThreshold, CountGoesWhateverTheThreshold) {
  const std::vector<float> scores = {5, 1, 4, 2, 3};
  const std::vector<int32_t> index = {0, 1, 2, 3, 4};
  EXPECT_THAT(*LowestScores(scores, index, {}, 4, 3, 2), UnorderedElementsAre(1, 3, 4));
}

TEST(SelectBelowThreshold, ProtectedAndEqualStay) {
  const std::vector<float> scores = {0, 1, 2, 0};
  const std::vector<int32_t> index = {0, 1, 2, 3};
  EXPECT_THAT(*LowestScores(scores, index, {.sinks = 1, .recent = 1}, 3, 0, 2),
              UnorderedElementsAre(1));
}

TEST(SelectBelowThreshold, ALaneKeepsItsFloor) {
  const std::vector<float> a = {9, 8, 7, 6}, b = {1, 2, 3, 4};
  const std::vector<int32_t> index = {0, 1, 2, 3};
  const std::vector<ScoredLane> lanes = {{a, index}, {b, index}};
  EXPECT_THAT(*LowestScoresOfPool(lanes, {}, 3, 1, 2, 7),
              testing::ElementsAre(UnorderedElementsAre(3), UnorderedElementsAre(0, 1)));
}

TEST(DrawnScores, StayAsOftenAsDrawingOneAfterAnotherKeepsThem) {
  const std::vector<float> mass = {1, 2, 3, 4};
  const std::vector<int32_t> index = {10, 11, 12, 13};
  constexpr double kTotal = 10;
  std::vector<double> expected(4);
  for (int a = 0; a < 4; ++a) {
    for (int b = 0; b < 4; ++b) {
      if (a == b) continue;
      const double p = mass[a] / kTotal * mass[b] / (kTotal - mass[a]);
      expected[a] += p;
      expected[b] += p;
    }
  }
  constexpr int kDraws = 20000;
  std::vector<int> stayed(4);
  for (int draw = 0; draw < kDraws; ++draw) {
    const std::vector<float> scores = DrawnScores(mass, index, 7, draw);
    const absl::StatusOr<std::vector<int32_t>> gone = LowestScores(scores, index, {}, 13, 2);
    ASSERT_TRUE(gone.ok());
    for (int32_t token : *gone) --stayed[token - 10];
    for (int& s : stayed) ++s;
  }
  for (int i = 0; i < 4; ++i) {
    const double deviation = std::sqrt(expected[i] * (1 - expected[i]) / kDraws);
    EXPECT_NEAR(static_cast<double>(stayed[i]) / kDraws, expected[i], 5 * deviation) << mass[i];
  }
}

TEST(DrawnScores, TokensWithoutMassGoFirst) {
  const std::vector<float> mass = {0, 1e-20f, 0, 1};
  const std::vector<int32_t> index = {0, 1, 2, 3};
  EXPECT_THAT(*LowestScores(DrawnScores(mass, index, 1, 1), index, {}, 3, 2),
              UnorderedElementsAre(0, 2));
}

}  // namespace select_test
}  // namespace epikv
