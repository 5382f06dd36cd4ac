#include "policies/select.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace epikv {
namespace {

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

}  // namespace
}  // namespace epikv
