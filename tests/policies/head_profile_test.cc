#include "policies/head_profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "policies/registry.h"

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

std::vector<int64_t> DuoBudgets(absl::string_view scores, double sparsity) {
  const PolicySpec& spec = *FindPolicy(AllPolicies(), "duo_attention");
  ModelShape shape = kShape;
  shape.artefacts["duo_attention"] = *ReadHeadProfile({.json = scores, .arrays = {}}, shape);
  const ResolvedParams resolved = ResolveParams(spec, {{"sparsity", sparsity}}, shape);
  EXPECT_TRUE(resolved.violations.empty());
  return spec.lane_budgets(resolved.params, shape, 100);
}

TEST(DuoAttention, HeadsThatLookUpLeastStream) {
  EXPECT_THAT(DuoBudgets(R"({"scores": [[4, 1], [2, 3]]})", 0.5), ElementsAre(150, 50, 50, 150));
  // Of equal heads the earlier.
  EXPECT_THAT(DuoBudgets(R"({"scores": [[1, 1], [1, 1]]})", 0.25), ElementsAre(50, 117, 116, 117));
}

TEST(DuoAttention, OneHeadKeepsMore) {
  EXPECT_THAT(DuoBudgets(R"({"scores": [[4, 1], [2, 3]]})", 1), ElementsAre(250, 50, 50, 50));
  EXPECT_THAT(DuoBudgets(R"({"scores": [[4, 1], [2, 3]]})", 0), ElementsAre(100, 100, 100, 100));
}

}  // namespace head_profile_test
}  // namespace epikv
