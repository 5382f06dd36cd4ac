#include "policies/protection.h"

#include <gtest/gtest.h>

namespace epikv {
namespace protection_test {

constexpr PolicyTraits kRefuses = {.prompt = PromptEviction::kRefuses};
constexpr PolicyTraits kByChunk = {.prompt = PromptEviction::kByChunk};

// How many of the tokens 0..newest are covered.
int64_t Covered(const Protection& protection, int64_t newest) {
  int64_t covered = 0;
  for (int64_t index = 0; index <= newest; ++index) covered += protection.Covers(index, newest);
  return covered;
}

TEST(Protection, RecentCountsTheCurrentToken) {
  const Protection protection{.recent = 3};
  EXPECT_TRUE(protection.Covers(8, 10));
  EXPECT_FALSE(protection.Covers(7, 10));
  EXPECT_EQ(Covered(protection, 10), 3);
}

TEST(Protection, NoRecentLeavesTheCurrentTokenOpen) {
  EXPECT_FALSE(Protection{.recent = 0}.Covers(10, 10));
}

TEST(Protection, PromptAndSinksAreTheFirstTokens) {
  const Protection protection{.prompt = 2, .sinks = 4};
  EXPECT_TRUE(protection.Covers(3, 100));
  EXPECT_FALSE(protection.Covers(4, 100));
}

TEST(Protection, SpansAreHalfOpen) {
  const Protection protection{.spans = {{10, 12}}};
  EXPECT_FALSE(protection.Covers(9, 100));
  EXPECT_TRUE(protection.Covers(10, 100));
  EXPECT_TRUE(protection.Covers(11, 100));
  EXPECT_FALSE(protection.Covers(12, 100));
}

TEST(Protection, ForeverExcludesRecent) {
  const Protection protection{.prompt = 2, .recent = 50, .spans = {{10, 12}}};
  EXPECT_TRUE(protection.CoversForever(1));
  EXPECT_TRUE(protection.CoversForever(11));
  EXPECT_FALSE(protection.CoversForever(40));
}

// Far enough along, nothing overlaps the recent window: then the size is exact.
TEST(Protection, SizeCountsOverlapsOnce) {
  const Protection cases[] = {
      {.prompt = 5, .sinks = 4, .recent = 3},
      {.prompt = 2, .sinks = 4, .recent = 3},
      {.prompt = 5, .recent = 3, .spans = {{3, 8}}},
      {.prompt = 5, .recent = 3, .spans = {{10, 20}, {15, 25}, {12, 14}, {40, 41}}},
      {.recent = 1, .spans = {{7, 7}}},
      {},
  };
  for (const Protection& protection : cases) {
    EXPECT_EQ(protection.Size(), Covered(protection, 1000));
  }
}

TEST(ResolveProtection, PromptThatFitsIsKept) {
  const auto resolved = ResolveProtection({}, kRefuses, 84, 100);
  EXPECT_EQ(resolved.protection.prompt, 84);
  EXPECT_LE(resolved.smallest_budget, 100);
}

TEST(ResolveProtection, PromptFitsOnlyWith16Beside) {
  const auto refused = ResolveProtection({}, kRefuses, 85, 100);
  EXPECT_EQ(refused.smallest_budget, 85 + 16);
  const auto evicted = ResolveProtection({}, kByChunk, 85, 100);
  EXPECT_EQ(evicted.protection.prompt, 0);
  EXPECT_LE(evicted.smallest_budget, 100);
}

TEST(ResolveProtection, SmallestBudgetSuffices) {
  for (const PolicyTraits& traits : {kRefuses, kByChunk}) {
    for (int64_t prompt : {0, 1, 10, 100, 500}) {
      const ProtectionOptions options{.sinks = 4, .spans = {{2, 30}}};
      const int64_t smallest = ResolveProtection(options, traits, prompt, 10).smallest_budget;
      EXPECT_LE(ResolveProtection(options, traits, prompt, smallest).smallest_budget, smallest);
    }
  }
}

TEST(ResolveProtection, RecentIsTheLeastOf128AQuarterAndTheRoom) {
  EXPECT_EQ(ResolveProtection({}, kRefuses, 10, 4096).protection.recent, 128);
  EXPECT_EQ(ResolveProtection({}, kRefuses, 10, 400).protection.recent, 100);
  EXPECT_EQ(ResolveProtection({}, kRefuses, 384, 400).protection.recent, 16);
}

TEST(ResolveProtection, CurrentTokenAlwaysSurvives) {
  EXPECT_EQ(ResolveProtection({}, kByChunk, 10, 2).protection.recent, 1);
}

TEST(ResolveProtection, WhatFitsTheRuleFitsTheBudget) {
  for (int64_t budget = 1; budget < 300; ++budget) {
    for (int64_t prompt = 0; prompt < 300; prompt += 7) {
      const auto resolved = ResolveProtection({.equal = true}, kByChunk, prompt, budget);
      if (resolved.smallest_budget > budget) continue;
      EXPECT_LE(resolved.protection.Size(), budget) << "budget " << budget << " prompt " << prompt;
    }
  }
}

TEST(ResolveProtection, SinksAreThePolicysUnlessGiven) {
  const PolicyTraits traits{.published = {.sinks = 7}};
  EXPECT_EQ(ResolveProtection({}, traits, 10, 100).protection.sinks, 7);
  EXPECT_EQ(ResolveProtection({.sinks = 1}, traits, 10, 100).protection.sinks, 1);
  EXPECT_EQ(ResolveProtection({.equal = true}, traits, 10, 100).protection.sinks, 4);
}

TEST(ResolveProtection, RequestOverridesTheRule) {
  const auto resolved =
      ResolveProtection({.prompt = false, .recent = 9, .spans = {{1, 3}}}, kRefuses, 10, 100);
  EXPECT_EQ(resolved.protection.prompt, 0);
  EXPECT_EQ(resolved.protection.recent, 9);
  EXPECT_EQ(resolved.protection.spans, (std::vector<TokenSpan>{{1, 3}}));
  EXPECT_EQ(resolved.smallest_budget, 2 + 9 + 1 - 1);
}

TEST(ResolveProtection, PublishedIsTheDefaultAndNoMore) {
  const PolicyTraits traits{
      .prompt = PromptEviction::kByChunk,
      .published = {.prompt = false, .sinks = 2, .recent = 20},
  };
  const Protection published = ResolveProtection({}, traits, 30, 100).protection;
  EXPECT_EQ(published, (Protection{.prompt = 0, .sinks = 2, .recent = 20}));
  const Protection asked =
      ResolveProtection({.prompt = true, .sinks = 0, .recent = 3}, traits, 30, 100).protection;
  EXPECT_EQ(asked, (Protection{.prompt = 30, .sinks = 0, .recent = 3}));
  const Protection equal = ResolveProtection({.equal = true}, traits, 30, 100).protection;
  EXPECT_EQ(equal, (Protection{.prompt = 30, .sinks = 4, .recent = 25}));
}

TEST(ResolveProtection, PublishedRecentFitsTheBudget) {
  const PolicyTraits tokens{.prompt = PromptEviction::kByChunk, .published = {.recent = 64}};
  EXPECT_EQ(ResolveProtection({}, tokens, 30, 80).protection.recent, 50);
  const PolicyTraits share{.prompt = PromptEviction::kByChunk, .published = {.recent_share = 0.5}};
  EXPECT_EQ(ResolveProtection({}, share, 30, 80).protection.recent, 40);
}

}  // namespace protection_test
}  // namespace epikv
