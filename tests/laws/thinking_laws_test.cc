// Laws of an answer's thinking: kept as far as it is protected, and evicted once it has ended.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "tests/fixtures/engine_harness.h"
#include "tests/fixtures/law_cases.h"
#include "tests/fixtures/law_model.h"

namespace epikv {
namespace thinking_laws_test {

constexpr int64_t kAsked = 40, kSaid = 90, kHeld = 72, kKept = 6;

// (model, policy).
using Thinking = EveryPolicy;

RequestOptions Generating(const Manifest& manifest, const PolicyCase& policy, int64_t budget) {
  RequestOptions options = WithPolicy(Scoring(manifest, kAsked, 1, 5), policy, budget);
  options.forced.clear();
  options.output = {.logprobs = true, .kv_trace = true, .kept = true};
  options.stop.max_output_tokens = kSaid;
  options.sampling.temperature = 1.;
  options.sampling.seed = 11;
  return options;
}

std::vector<int32_t> TokensOf(const RequestOptions& options, const Transcript& transcript) {
  std::vector<int32_t> tokens = options.prompt;
  tokens.insert(tokens.end(), transcript.tokens.begin(), transcript.tokens.end() - 1);
  return tokens;
}

// Until it ends, nothing is other than without; then it is gone but for what is protected, and all
// that follows is plain attention over what is left.
TEST_P(Thinking, GoesOnceItHasEnded) {
  EngineHarness harness = Harness({.end_tokens = false});
  RequestOptions options = Generating(harness.manifest(), policy(), kHeld);
  options.kv.protection.thinking = kKept;
  options.thinking = ThinkingMarks{.tags = {"<never>", "<never>"}, .begun = true};
  const Transcript before = harness.Run(options);
  ASSERT_TRUE(before.ok()) << before.finished->status;
  EXPECT_EQ(before.finished->thinking_tokens, kSaid);
  const std::optional<Thought> thought = ThoughtIn(harness.tokenizer(), before.tokens);
  if (!thought.has_value()) GTEST_SKIP() << "the model says too little";
  harness.model().TakeLogits();
  options.thinking = thought->marks;
  options.kv.evict_thinking = true;
  if (policy().policy == "thinkv_tbe") {  // which could not go on
    EXPECT_THAT(harness.Refusal(options).message, ::testing::HasSubstr("kv.thinking.evict"));
    return;
  }
  const Transcript transcript = harness.Run(options);
  ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
  EXPECT_EQ(transcript.finished->thinking_tokens, thought->end);
  for (int64_t i = 0; i <= thought->end + 1; ++i) {
    EXPECT_EQ(transcript.tokens[i], before.tokens[i]) << i;
  }
  const int64_t begin = kAsked, end = kAsked + thought->end;
  const std::vector<int32_t>& kept = transcript.finished->kv.kept;
  for (const int32_t token : kept) EXPECT_FALSE(token >= begin + kKept && token < end) << token;
  for (int32_t token = begin; token < begin + kKept; ++token) {
    EXPECT_TRUE(std::binary_search(kept.begin(), kept.end(), token)) << token;
  }
  if (RoundsRows(policy())) return;
  const std::vector<at::Tensor> got = harness.model().TakeLogits();
  const std::vector<int32_t> cached = TokensOf(options, transcript);
  const MaskedReference reference(harness.model(), kv_dtype());
  const auto wanted = reference.Run(cached, DroppedBy(transcript, harness.manifest()));
  ASSERT_GE(std::ssize(got), kSaid);  // of some policies, those of the prompt, too
  for (int64_t i = 0; i < kSaid; ++i) {
    const int64_t step = std::ssize(cached) - kSaid + i;
    const at::Tensor& logits = got[std::ssize(got) - kSaid + i];
    EXPECT_LT((logits - wanted[step].logits).abs().max().item<double>(),
              kv_dtype() == KvDType::kInt8 ? 0.1 : 2e-4)
        << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, Thinking,
                         ::testing::Combine(::testing::Values("gqa", "gqa_int8"),
                                            ::testing::ValuesIn(EvictingPolicies())),
                         CaseName);

// Without a budget it goes, too, and so it does of each of several completions.
TEST(ThinkingLaws, GoesWithoutABudget) {
  EngineHarness harness(ModelPath("gqa"), {.end_tokens = false});
  RequestOptions options = Generating(harness.manifest(), {.policy = "full"}, 0);
  options.kv.budget = std::monostate();
  const Transcript before = harness.Run(options);
  const std::optional<Thought> thought = ThoughtIn(harness.tokenizer(), before.tokens);
  ASSERT_TRUE(thought.has_value());
  options.thinking = thought->marks;
  options.kv.evict_thinking = true;
  const Transcript transcript = harness.Run(options);
  ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
  const KvUsage& kv = transcript.finished->kv;
  EXPECT_EQ(std::ssize(kv.kept), kAsked + kSaid - 1 - thought->end);
  EXPECT_EQ(kv.rounds, 1);
  options.completions = 3;
  const Transcript several = harness.Run(options);
  ASSERT_TRUE(several.ok()) << several.finished->status;
  EXPECT_EQ(several.completions[0].tokens, transcript.tokens);
  EXPECT_EQ(several.completions[0].finished->kv.kept, kv.kept);
}

// It is gone from the tier, too: nothing of it comes back, by no guard.
TEST(ThinkingLaws, DoesNotComeBackFromATier) {
  EngineHarness harness(ModelPath("gqa"), {.kv_tier_bytes = 64 << 20, .end_tokens = false});
  int64_t recalled = 0;
  for (const char* policy : {"tova", "h2o", "snapkv", "keydiff"}) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      RequestOptions options = Generating(harness.manifest(), {.policy = policy}, 48);
      options.sampling.seed = seed;
      options.kv.protection.prompt = false;
      options.kv.protection.recent = 4;
      options.kv.tier = {.tokens = 100, .guard = GuardRule{.asked = 2}};
      options.thinking = ThinkingMarks{.tags = {"<never>", "<never>"}, .begun = true};
      const Transcript before = harness.Run(options);
      ASSERT_TRUE(before.ok()) << before.finished->status;
      const std::optional<Thought> thought = ThoughtIn(harness.tokenizer(), before.tokens);
      if (!thought.has_value()) continue;
      options.thinking = thought->marks;
      options.kv.evict_thinking = true;
      const Transcript transcript = harness.Run(options);
      ASSERT_TRUE(transcript.ok()) << policy << " " << seed << transcript.finished->status;
      const int64_t end = kAsked + thought->end;
      for (const EvictionTrace& trace : transcript.evictions) {
        for (const EvictionTrace::Victims& of : trace.victims) {
          recalled += std::ssize(of.recalled);
          for (const int32_t token : of.recalled) {
            EXPECT_FALSE(trace.at_token > end && token >= kAsked && token < end) << token;
          }
        }
      }
      for (const int32_t token : transcript.finished->kv.kept) {
        EXPECT_FALSE(token >= kAsked && token < end) << token;
      }
    }
  }
  EXPECT_GT(recalled, 100) << "guards took back";
}

// A tier that holds all, of which all is fetched, is the whole cache: less the thinking.
TEST(ThinkingLaws, IsNotFetchedFromATier) {
  EngineHarness harness(ModelPath("gqa"), {.kv_tier_bytes = 64 << 20, .end_tokens = false});
  RequestOptions options = Generating(harness.manifest(), {.policy = "full"}, 0);
  options.kv.budget = std::monostate();
  const Transcript before = harness.Run(options);
  const std::optional<Thought> thought = ThoughtIn(harness.tokenizer(), before.tokens);
  ASSERT_TRUE(thought.has_value());
  options.thinking = thought->marks;
  options.kv.evict_thinking = true;
  harness.model().TakeLogits();
  const Transcript whole = harness.Run(options);
  ASSERT_TRUE(whole.ok()) << whole.finished->status;
  const std::vector<at::Tensor> wanted = harness.model().TakeLogits();
  options.kv.policy = "h2o";
  options.kv.budget = int64_t{48};
  options.kv.protection.prompt = false;
  options.kv.tier = {.tokens = 200, .fetch = 200};
  const Transcript transcript = harness.Run(options);
  ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
  EXPECT_GT(transcript.finished->kv.tier.fetched, 0);
  const std::vector<at::Tensor> got = harness.model().TakeLogits();
  EXPECT_EQ(transcript.tokens, whole.tokens);
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_LT((got[i] - wanted[i]).abs().max().item<double>(), 2e-4) << i;
  }
}

TEST(ThinkingLaws, WhatIsProtectedOfItCountsAsSuch) {
  EngineHarness harness(ModelPath("gqa"), {.end_tokens = false});
  RequestOptions options = Generating(harness.manifest(), {.policy = "sliding"}, kHeld);
  options.kv.protection.prompt = true;
  options.kv.protection.thinking = kHeld - kAsked;
  EXPECT_TRUE(harness.Run(options).ok()) << "it has no thinking";
  options.thinking = ThinkingMarks{.tags = {"<never>", "<never>"}, .begun = true};
  const Rejection refusal = harness.Refusal(options);
  EXPECT_EQ(refusal.reason, "KV_BUDGET");
  options.kv.protection.thinking -= 8;
  EXPECT_TRUE(harness.Run(options).ok());
}

}  // namespace thinking_laws_test
}  // namespace epikv
