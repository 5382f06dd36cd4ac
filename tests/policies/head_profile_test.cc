#include "policies/head_profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>


namespace epikv {
namespace head_profile_test {

using testing::ElementsAre;

const ModelShape kShape{.num_layers = 2, .num_kv_heads = 2};

absl::Status Read(absl::string_view json) {
  return ReadHeadProfile({.json = json, .arrays = {}}, kShape).status();
}

TEST(HeadProfile, HasAScoreOfEachHeadAndOneAboveZero) {
  EXPECT_TRUE(Read(R"({"scores": [[0, 1], [0.5, 0]]})").ok());
  for (const char* json :
       {R"([])", R"({})", R"({"scores": [[0, 1]]})", R"({"scores": [[0, 1], [1]]})",
        R"({"scores": [[0, 1], [-1, 0]]})", R"({"scores": [[0, 0], [0, 0]]})",
        R"({"scores": [[0, "1"], [1, 1]]})", R"({"scores": [[1e308, 1e308], [1, 1]]})"}) {
    EXPECT_EQ(Read(json).code(), absl::StatusCode::kInvalidArgument) << json;
  }
}

TEST(HeadProfile, BudgetsAreInProportionAboveTheLeastAndSumExactly) {
  EXPECT_THAT(BudgetsByWeight({1, 0, 3, 0}, 10, 30), ElementsAre(30, 10, 70, 10));
  EXPECT_THAT(BudgetsByWeight({1, 0, 3, 0}, 30, 30), ElementsAre(30, 30, 30, 30));
  for (const int64_t budget : {31, 57, 1000}) {
    const std::vector<double> weights = {.1, .7, .2, .31, .004, .9, 0};
    const std::vector<int64_t> budgets = BudgetsByWeight(weights, 13, budget);
    EXPECT_EQ(std::reduce(budgets.begin(), budgets.end()), budget * 7);
    EXPECT_EQ(budgets.back(), 13);
    for (size_t i = 0; i < budgets.size(); ++i) {
      const double share = (budget - 13) * 7 * weights[i] / (.1 + .7 + .2 + .31 + .004 + .9);
      EXPECT_NEAR(static_cast<double>(budgets[i]), 13 + share, 1) << i;
    }
  }
}

}  // namespace head_profile_test
}  // namespace epikv
