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

#include "server/experiments/sample_ratio.h"
#include "tests/experiment_goldens.h"

namespace epikv {
namespace {

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

}  // namespace
}  // namespace epikv
