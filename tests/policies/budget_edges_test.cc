// Budgets at which the EpiKV authors' harness goes wrong (it fills up with the prompt, drops the
// token it has just made, or drops nothing), and what happens here instead.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "policies/registry.h"
#include "tests/fixtures/fake_sequence.h"

namespace epikv {
namespace budget_edges_test {

const PolicySpec& Named(const std::string& name) { return *FindPolicy(AllPolicies(), name); }

PolicyTraits TraitsOf(const PolicySpec& spec) {
  const ModelShape shape{.num_layers = 3, .num_heads = 4, .num_kv_heads = 2};
  return spec.traits(ResolveParams(spec, {}, shape).params, shape);
}

// Under the runtime's own protection, with its prompt cached.
FakeSequence Sequence(const std::string& policy, std::map<std::string, ParamValue> params,
                      const Protection& protection, int64_t prompt, int64_t budget) {
  FakeSequence sequence({.spec = &Named(policy),
                         .params = std::move(params),
                         .protection = protection,
                         .prompt_tokens = prompt,
                         .budget = budget},
                        RandomWorld(7, 1 << 20));
  if (prompt > 0) sequence.Prefill(prompt);
  sequence.Round();
  return sequence;
}

std::vector<int32_t> Range(int32_t begin, int32_t end) {
  std::vector<int32_t> range(end - begin);
  std::iota(range.begin(), range.end(), begin);
  return range;
}

// Theirs: every decoded token goes at once, the current one too, and the prompt stays over the
// budget; of segments, prompt + R stay.
TEST(BudgetEdges, PromptThatFillsTheBudgetIsRefused) {
  for (const char* name :
       {"epikv_flat", "epikv_hs_variance", "epikv_band_adaptive", "kv_key_variance",
        "kv_value_variance", "raas", "epikv_seg", "segment_hs", "attention_hs_product"}) {
    SCOPED_TRACE(name);
    const PolicyTraits traits = TraitsOf(Named(name));
    for (const int64_t budget : {int64_t{100}, int64_t{256}, 256 + kRoomBesidePrompt - 1}) {
      EXPECT_GE(ResolveProtection({}, traits, 256, budget).smallest_budget,
                256 + kRoomBesidePrompt);
    }
    EXPECT_EQ(ResolveProtection({}, traits, 256, 256 + kRoomBesidePrompt).smallest_budget, 256 + 1);
  }
}

// They can rank the prompt: theirs keep all of it, over the budget.
TEST(BudgetEdges, PromptOverTheBudgetIsEvictedWhereItCanBeRanked) {
  for (const char* name : {"epikv_lag_kv", "epikv_lag_kv_key"}) {
    SCOPED_TRACE(name);
    const Protection protection = ResolveProtection({}, TraitsOf(Named(name)), 80, 40).protection;
    EXPECT_EQ(protection.prompt, 0);
    FakeSequence sequence = Sequence(name, {}, protection, 80, 40);
    EXPECT_EQ(sequence.Kept().size(), 40u);
    for (int i = 0; i < 30; ++i) {
      sequence.Decode();
      sequence.Round();
      EXPECT_EQ(sequence.Kept().size(), 40u);
      EXPECT_EQ(sequence.Kept().back(), sequence.newest());
    }
  }
}

// Theirs, with a budget of 256 and a prompt of 230, froze the 8 oldest decoded tokens and kept only
// 18 recent ones: every token of a window larger than the room tied.
TEST(BudgetEdges, RecentWindowShrinksToTheRoomBesideThePrompt) {
  for (const char* name :
       {"epikv_flat", "epikv_hs_variance", "kv_key_variance", "kv_value_variance"}) {
    SCOPED_TRACE(name);
    const ResolvedProtection resolved = ResolveProtection({}, TraitsOf(Named(name)), 230, 256);
    EXPECT_LE(resolved.smallest_budget, 256);
    EXPECT_EQ(resolved.protection.recent, 26);
    FakeSequence sequence = Sequence(name, {}, resolved.protection, 230, 256);
    for (int i = 0; i < 100; ++i) {
      sequence.Decode();
      sequence.Round();
    }
    std::vector<int32_t> expected = Range(0, 230);
    const std::vector<int32_t> newest = Range(330 - 26, 330);
    expected.insert(expected.end(), newest.begin(), newest.end());
    EXPECT_EQ(sequence.Kept(), expected);
  }
}

// A reserve and a recent window that are together over the room: the window stays, the reserve has
// what is left of it.
TEST(BudgetEdges, ReserveOverTheRoomLeavesTheRecent) {
  const Protection protection{.prompt = 10, .recent = 6};
  FakeSequence sequence =
      Sequence("epikv_flat", {{"reserve", int64_t{64}}}, protection, 10, 10 + 6 + 3);
  for (int i = 0; i < 60; ++i) {
    sequence.Decode();
    sequence.Round();
    const std::vector<int32_t> kept = sequence.Kept();
    ASSERT_LE(kept.size(), 19u);
    const int32_t newest = static_cast<int32_t>(sequence.newest());
    for (int32_t recent = std::max(10, newest - 5); recent <= newest; ++recent) {
      EXPECT_TRUE(std::binary_search(kept.begin(), kept.end(), recent)) << recent;
    }
  }
}

// In Python x[-0:] is all of x: theirs protected every token then, and dropped none.
TEST(BudgetEdges, NothingRecentProtectsNothing) {
  for (const char* name : {"epikv_flat", "h2o", "epikv_seg", "segment_hs", "thinkv"}) {
    SCOPED_TRACE(name);
    FakeSequence sequence = Sequence(name, {}, {.prompt = 10}, 10, 40);
    size_t rounds = 0;
    for (int i = 0; i < 200; ++i) {
      sequence.Decode();
      if (sequence.OverBudget()) {
        sequence.Round();
        ++rounds;
        EXPECT_LE(sequence.Kept().size(), 40u);
      }
    }
    EXPECT_GT(rounds, 1u);
  }
}

// Segments that would all retain everything: the oldest do, as far as the budget goes.
TEST(BudgetEdges, RetainedOfSegmentsIsBoundedByTheRoom) {
  const std::map<std::string, ParamValue> all = {{"segment", int64_t{4}},
                                                 {"retain_r", int64_t{4}},
                                                 {"retain_e", int64_t{4}},
                                                 {"retain_t", int64_t{4}}};
  for (const char* name : {"epikv_seg", "segment_hs", "thinkv"}) {
    SCOPED_TRACE(name);
    const Protection protection{.prompt = 6, .recent = 5};
    FakeSequence sequence = Sequence(name, all, protection, 6, 30);
    for (int i = 0; i < 60; ++i) {
      sequence.Decode();
      sequence.Round();
    }
    // Six whole segments, the prompt's tokens among them; of the next its best; the recent.
    const std::vector<int32_t> kept = sequence.Kept();
    ASSERT_EQ(kept.size(), 30u);
    EXPECT_EQ(std::vector<int32_t>(kept.begin(), kept.begin() + 24), Range(0, 24));
    EXPECT_EQ(std::vector<int32_t>(kept.end() - 5, kept.end()), Range(61, 66));
  }
}

// A budget of the protected tokens alone: a round leaves them and nothing else.
TEST(BudgetEdges, RoomForTheProtectedAlone) {
  const Protection protection{.prompt = 8, .sinks = 4, .recent = 5, .spans = {{12, 15}}};
  FakeSequence sequence = Sequence("epikv_flat", {}, protection, 8, protection.Size());
  for (int i = 0; i < 40; ++i) {
    sequence.Decode();
    sequence.Round();
  }
  EXPECT_THAT(sequence.Kept(),
              testing::ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 43, 44, 45, 46, 47));
}

}  // namespace budget_edges_test
}  // namespace epikv
