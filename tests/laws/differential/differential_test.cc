// Small trials of what was at fault once, or may well be, and some seeds: each answer is what the
// request gets alone (play.h). The fuzzer itself: tests/soak.sh requests.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/laws/differential/play.h"
#include "tests/laws/differential/trial.h"

namespace epikv {
namespace differential_test {

std::vector<std::string> Corpus() {
  std::vector<std::string> names;
  for (const auto& entry :
       std::filesystem::directory_iterator(EPIKV_SOURCE_DIR "/tests/laws/differential/corpus")) {
    names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

class DifferentialCorpus : public ::testing::TestWithParam<std::string> {};

TEST_P(DifferentialCorpus, GivesWhatEachRequestGetsAlone) {
  std::ifstream file(EPIKV_SOURCE_DIR "/tests/laws/differential/corpus/" + GetParam() + ".json");
  const Tally tally = PlayTrial(TrialOf(nlohmann::json::parse(file)));
  EXPECT_GT(tally.whole + tally.cut + tally.failed, 0) << "nothing was accepted";
}

INSTANTIATE_TEST_SUITE_P(Corpus, DifferentialCorpus, ::testing::ValuesIn(Corpus()),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

class DifferentialSeeds : public ::testing::TestWithParam<uint64_t> {};

TEST_P(DifferentialSeeds, GivesWhatEachRequestGetsAlone) { PlayTrial(DrawTrial(GetParam())); }

INSTANTIATE_TEST_SUITE_P(Seeds, DifferentialSeeds, ::testing::Range<uint64_t>(1, 41));

TEST(Trial, ComesBackFromItsText) {
  for (uint64_t seed = 1; seed < 200; ++seed) {
    const nlohmann::json text = ToJson(DrawTrial(seed));
    EXPECT_EQ(ToJson(TrialOf(nlohmann::json::parse(text.dump()))), text) << seed;
  }
}

}  // namespace differential_test
}  // namespace epikv
