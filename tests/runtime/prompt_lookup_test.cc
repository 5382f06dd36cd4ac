#include "runtime/engine/prompt_lookup.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace epikv {
namespace prompt_lookup_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(PromptLookup, WhatFollowedBeforeIsTheGuess) {
  EXPECT_THAT(LookUpPrompt({1, 2, 3, 4, 5, 9, 1, 2}, 3), ElementsAre(3, 4, 5));
  EXPECT_THAT(LookUpPrompt({1, 2, 3, 4, 5, 9, 1, 2}, 2), ElementsAre(3, 4));
}

TEST(PromptLookup, GuessesGoOnIntoWhatWasLookedFor) {
  EXPECT_THAT(LookUpPrompt({1, 2, 3, 9, 1, 2}, 3), ElementsAre(3, 9, 1));
}

TEST(PromptLookup, WhatRepeatsGoesOn) {
  EXPECT_THAT(LookUpPrompt({7, 1, 2, 1, 2}, 5), ElementsAre(1, 2, 1, 2, 1));
  EXPECT_THAT(LookUpPrompt({4, 4, 4, 4}, 3), ElementsAre(4, 4, 4));
}

TEST(PromptLookup, OneTokenThatAgreesIsNoPlace) {
  EXPECT_THAT(LookUpPrompt({1, 2, 3, 2}, 4), IsEmpty());
  EXPECT_THAT(LookUpPrompt({1, 2}, 4), IsEmpty());
  EXPECT_THAT(LookUpPrompt({}, 4), IsEmpty());
}

TEST(PromptLookup, ThePlaceWhereMostAgreeWinsThenTheLast) {
  // 5 1 2 is longer than 1 2, which comes later.
  EXPECT_THAT(LookUpPrompt({5, 1, 2, 30, 8, 1, 2, 31, 5, 1, 2}, 1), ElementsAre(30));
  EXPECT_THAT(LookUpPrompt({1, 2, 30, 8, 1, 2, 31, 9, 1, 2}, 1), ElementsAre(31));
}

TEST(PromptLookup, NoGuessesAreWanted) { EXPECT_THAT(LookUpPrompt({1, 2, 1, 2}, 0), IsEmpty()); }

TEST(PromptLookup, OldTokensAreNotLookedThrough) {
  std::vector<int32_t> tokens = {1, 2, 3};
  for (int32_t i = 0; i < kLookedThrough; ++i) tokens.push_back(1000 + i);
  tokens.insert(tokens.end(), {1, 2});
  EXPECT_THAT(LookUpPrompt(tokens, 1), IsEmpty());
}

// Against the definition, over texts of few tokens.
TEST(PromptLookup, AgreesWithItsDefinition) {
  std::mt19937 dice(7);
  for (int round = 0; round < 2000; ++round) {
    std::vector<int32_t> tokens(dice() % 30);
    for (int32_t& token : tokens) token = static_cast<int32_t>(dice() % 3);
    const auto size = static_cast<int64_t>(tokens.size());
    int64_t best = 1, next = -1;
    for (int64_t end = 1; end < size; ++end) {
      int64_t agree = 0;
      while (agree < 8 && agree < end && tokens[end - 1 - agree] == tokens[size - 1 - agree]) {
        ++agree;
      }
      if (agree >= 2 && agree >= best) {
        best = agree;
        next = end;
      }
    }
    std::vector<int32_t> wanted;
    for (int64_t i = 0; next >= 0 && i < 5; ++i) {
      wanted.push_back(tokens[next + i % (size - next)]);
    }
    EXPECT_EQ(LookUpPrompt(tokens, 5), wanted);
  }
}

}  // namespace prompt_lookup_test
}  // namespace epikv
