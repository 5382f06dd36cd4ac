#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/fixtures/fake_sequence.h"

// The policy of docs/writing-a-policy.md, from the file that the page shows. Who follows the page
// gives the registry a policy of that name: here it has another, so that a program can have both.
#define kEveryNth kEveryNthOfThePage
#include "docs/examples/every_nth.cc"
#undef kEveryNth

namespace epikv {
namespace tutorial_policy_test {

using Rounds = std::vector<std::vector<int32_t>>;  // the victims of each, ascending

// A prompt of two, which is protected, as the newest two are. Nothing of a model is looked at.
FakeSequence::Options Options(int64_t budget, std::map<std::string, ParamValue> params) {
  FakeSequence::Options options;
  options.spec = &kEveryNthOfThePage;
  options.params = std::move(params);
  options.protection = {.prompt = 2, .recent = 2};
  options.prompt_tokens = 2;
  options.budget = budget;
  return options;
}

// Decodes until there have been so many tokens, prompt included.
Rounds Play(FakeSequence& sequence, int64_t tokens) {
  Rounds rounds;
  while (sequence.newest() < tokens - 1) {
    sequence.Decode();
    std::vector<std::vector<int32_t>> victims = sequence.Round();
    if (!victims.empty()) rounds.push_back(std::move(victims[0]));  // all lanes are one
  }
  return rounds;
}

TEST(TutorialPolicy, DropsEverySecondThenEverySecondOfThose) {
  FakeSequence sequence(Options(/*budget=*/7, {}), {});
  sequence.Prefill(2);
  // A token is open to eviction once two newer ones are there. Where no odd one is, 2, 6 and 10 go,
  // which 2 divides once, and then 4.
  const Rounds expected = {{3}, {5}, {7}, {2}, {9}, {6}, {11}, {10}, {13}, {14}, {15}, {4}, {17}};
  EXPECT_EQ(Play(sequence, 20), expected);
  EXPECT_EQ(sequence.Kept(), (std::vector<int32_t>{0, 1, 8, 12, 16, 18, 19}));
}

// The picture of the page's scenario.
TEST(TutorialPolicy, AmongEqualsTheOlderGoes) {
  FakeSequence sequence(Options(/*budget=*/7, {}), {});
  sequence.Prefill(2);
  while (sequence.newest() < 11) sequence.Decode();
  EXPECT_EQ(sequence.Round(), (Rounds{{2, 3, 5, 7, 9}}));  // of 2 and 6 the older
  EXPECT_EQ(sequence.Kept(), (std::vector<int32_t>{0, 1, 4, 6, 8, 10, 11}));
}

TEST(TutorialPolicy, LargerNKeepsTokensThatLieFurtherApart) {
  FakeSequence::Options options = Options(/*budget=*/9, {{"n", int64_t{4}}});
  options.protection = {.prompt = 1, .recent = 2};
  options.prompt_tokens = 1;
  FakeSequence sequence(options, {});
  sequence.Prefill(1);
  Play(sequence, 40);
  EXPECT_EQ(sequence.Kept(), (std::vector<int32_t>{0, 16, 20, 24, 28, 32, 36, 38, 39}));
}

TEST(TutorialPolicy, SlackMakesRoundsOfSeveralVictims) {
  FakeSequence::Options options = Options(/*budget=*/8, {{"n", int64_t{3}}, {"slack", int64_t{3}}});
  options.protection = {.recent = 1};
  options.prompt_tokens = 0;
  FakeSequence sequence(options, {});
  const Rounds expected = {{1, 2, 4, 5}, {7, 8, 10, 11}, {13, 14, 16, 17}, {3, 19, 20, 22}};
  EXPECT_EQ(Play(sequence, 24), expected);
  EXPECT_EQ(sequence.Kept(), (std::vector<int32_t>{0, 6, 9, 12, 15, 18, 21, 23}));
}

TEST(TutorialPolicy, ThinsAPromptThatIsOverTheBudget) {
  FakeSequence::Options options = Options(/*budget=*/6, {});
  options.protection = {.recent = 1};
  options.prompt_tokens = 10;
  FakeSequence sequence(options, {});
  sequence.Prefill(10);
  EXPECT_EQ(sequence.Round(), (Rounds{{1, 3, 5, 7}}));
  EXPECT_EQ(sequence.Kept(), (std::vector<int32_t>{0, 2, 4, 6, 8, 9}));
}

TEST(TutorialPolicy, OrderOfSlotsDoesNotMatter) {
  FakeSequence sequence(Options(/*budget=*/7, {}), {}), shuffled(Options(/*budget=*/7, {}), {});
  std::mt19937 random(1);
  sequence.Prefill(2);
  shuffled.Prefill(2);
  for (int i = 0; i < 60; ++i) {
    sequence.Decode();
    shuffled.Decode();
    shuffled.Shuffle(random);
    ASSERT_EQ(sequence.Round(), shuffled.Round()) << "after decode token " << i;
  }
}

TEST(TutorialPolicy, RefusesAnNOfOne) {
  const ModelShape shape = FakeSequence::Options().shape;
  std::map<std::string, ParamValue> params = {{"n", int64_t{1}}};
  const ResolvedParams one = ResolveParams(kEveryNthOfThePage, params, shape);
  ASSERT_EQ(one.violations.size(), 1u);
  EXPECT_EQ(one.violations[0].param, "n");
  params["n"] = int64_t{2};
  EXPECT_TRUE(ResolveParams(kEveryNthOfThePage, params, shape).violations.empty());
}

}  // namespace tutorial_policy_test
}  // namespace epikv
