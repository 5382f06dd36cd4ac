// Several completions of one prompt: each is what a request of its seed would have been, and
// together they take what was reserved.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <variant>
#include <vector>

#include "runtime/executor/executor.h"
#include "tests/fixtures/engine_harness.h"
#include "tests/fixtures/law_cases.h"

namespace epikv {
namespace completions_laws_test {

constexpr int64_t kCompletions = 3;

class EveryPolicyForks : public EveryPolicy {};

TEST_P(EveryPolicyForks, EachCompletionIsThatOfItsSeedAlone) {
  EngineHarness harness = Harness({.deterministic = true, .end_tokens = false});
  RequestOptions options;
  options.prompt = Text(harness.manifest(), 40, 23);
  options.stop.max_output_tokens = 110;
  options.sampling = {.temperature = 0.9f, .seed = 5};
  options.output.logprobs = true;
  options.output.residual_steps = true;
  options = WithPolicy(options, policy(), 80);
  std::vector<Transcript> alone;
  for (int64_t i = 0; i < kCompletions; ++i) {
    alone.push_back(harness.Run(options));
    ASSERT_TRUE(Evicted(alone.back(), harness.manifest()));
    ++options.sampling.seed;
  }
  options.sampling.seed = 5;
  options.completions = kCompletions;
  const Request request = std::get<Request>(harness.admission().Resolve(options));
  harness.OnStep([&] {
    EXPECT_LE(harness.executor().used_bytes(), harness.engine().ledger().reserved());
    EXPECT_LE(harness.engine().ledger().reserved(), request.demand.peak_bytes());
  });
  const Transcript together = harness.Run(options);
  ASSERT_TRUE(together.ok()) << together.finished->status;
  ASSERT_EQ(together.completions.size(), kCompletions);
  int64_t evicted = 0;
  for (int64_t i = 0; i < kCompletions; ++i) {
    const Transcript& one = together.completions[i];
    EXPECT_EQ(one.tokens, alone[i].tokens) << i;
    EXPECT_EQ(one.logprobs, alone[i].logprobs) << i;
    EXPECT_EQ(one.residual_steps, alone[i].residual_steps) << i;
    const KvUsage &kv = one.finished->kv, &kv_alone = alone[i].finished->kv;
    EXPECT_EQ(kv.kept, kv_alone.kept) << i;
    EXPECT_EQ(kv.rounds, kv_alone.rounds) << i;
    EXPECT_EQ(kv.evicted_entries, kv_alone.evicted_entries) << i;
    EXPECT_EQ(kv.peak_entries, kv_alone.peak_entries) << i;
    EXPECT_EQ(kv.final_entries, kv_alone.final_entries) << i;
    evicted += kv.evicted_entries;
  }
  EXPECT_NE(together.completions[0].tokens, together.completions[1].tokens);
  if (request.traits.rounds_every == 0) {
    EXPECT_EQ(together.finished->kv.evicted_entries, evicted) << "nothing of the prompt";
  } else {
    EXPECT_LT(together.finished->kv.evicted_entries, evicted) << "the prompt's once";
  }
  EXPECT_LE(together.finished->kv.peak_bytes, request.demand.peak_bytes());
  EXPECT_EQ(together.finished->output_tokens, kCompletions * 110);
  EXPECT_EQ(harness.engine().ledger().reserved(), 0);
  const KvPool& pool = harness.executor().pool();
  EXPECT_EQ(pool.free_rows(), pool.num_rows());
}

// A prompt over its budget is evicted once, and counts once.
TEST_P(EveryPolicyForks, PromptsOverTheBudgetAreEvictedOnce) {
  EngineHarness harness =
      Harness({.prefill_chunk_tokens = 32, .deterministic = true, .end_tokens = false});
  RequestOptions options;
  options.prompt = Text(harness.manifest(), 150, 37);
  options.stop.max_output_tokens = 20;
  options.sampling = {.temperature = 0.9f, .seed = 5};
  options = WithPolicy(options, policy(), 64);
  if (std::holds_alternative<Rejection>(harness.admission().Resolve(options))) {
    GTEST_SKIP() << "this policy takes no prompt over its budget";
  }
  const Transcript alone = harness.Run(options);
  ASSERT_TRUE(alone.ok());
  options.completions = kCompletions;
  const Transcript together = harness.Run(options);
  ASSERT_TRUE(together.ok()) << together.finished->status;
  EXPECT_EQ(together.completions[0].tokens, alone.tokens);
  EXPECT_EQ(together.completions[0].finished->kv.kept, alone.finished->kv.kept);
  int64_t evicted = 0;
  for (const Transcript& one : together.completions) {
    evicted += one.finished->kv.evicted_entries;
  }
  EXPECT_LT(together.finished->kv.evicted_entries, evicted);
  EXPECT_GE(together.finished->kv.evicted_entries, alone.finished->kv.evicted_entries);
}

// Each is remembered to its end, in whole blocks, for a turn that begins with it; from a block on
// that is half the prompt's, half its own.
TEST(Completions, EachKeepsWhatItHasCached) {
  EngineHarness harness(
      ModelPath("gqa"),
      {.prefill_chunk_tokens = 16, .max_prefix_bytes = 1 << 20, .end_tokens = false});
  RequestOptions options;
  options.prompt = Text(harness.manifest(), 40, 23);
  options.stop.max_output_tokens = 60;
  options.sampling = {.temperature = 1.0f, .seed = 5};
  options.completions = kCompletions;
  const Transcript together = harness.Run(options);
  ASSERT_TRUE(together.ok()) << together.finished->status;
  for (const Transcript& one : together.completions) {
    RequestOptions turn;
    turn.prompt = options.prompt;
    turn.prompt.insert(turn.prompt.end(), one.tokens.begin(), one.tokens.end());
    turn.stop.max_output_tokens = 1;
    EXPECT_EQ(harness.Run(turn).finished->cached_prompt_tokens, 96) << "of 99";
  }
}

INSTANTIATE_TEST_SUITE_P(Completions, EveryPolicyForks,
                         ::testing::Combine(::testing::Values("gqa"),
                                            ::testing::ValuesIn(EvictingPolicies())),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(NightlyCompletions, EveryPolicyForks,
                         ::testing::Combine(::testing::Values("gqa_bf16", "gqa_int8"),
                                            ::testing::ValuesIn(EvictingPolicies())),
                         CaseName);

}  // namespace completions_laws_test
}  // namespace epikv
