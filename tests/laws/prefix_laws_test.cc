// Prompts that begin alike: what is copied is what would have been computed, and the pool's room
// stays the requests'.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <variant>
#include <vector>

#include "runtime/executor/executor.h"
#include "tests/fixtures/engine_harness.h"
#include "tests/fixtures/law_cases.h"

namespace epikv {
namespace prefix_laws_test {

constexpr int64_t kRoom = 32 << 20;

int64_t HitOf(const Transcript& transcript) { return transcript.finished->cached_prompt_tokens; }

// `shared` tokens that all prompts of one seed begin with, then `own` of this one's.
std::vector<int32_t> Prompt(const Manifest& manifest, int64_t shared, int64_t own, int which) {
  const std::vector<int32_t> text = Text(manifest, shared + 3 * own, 41);
  std::vector<int32_t> prompt(text.begin(), text.begin() + shared);
  prompt.insert(prompt.end(), text.begin() + shared + which * own,
                text.begin() + shared + (which + 1) * own);
  return prompt;
}

void ExpectSameRun(const Transcript& a, const Transcript& b) {
  ASSERT_TRUE(a.ok()) << a.finished->status;
  ASSERT_TRUE(b.ok()) << b.finished->status;
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_EQ(a.logprobs, b.logprobs);
  EXPECT_EQ(a.residual_steps, b.residual_steps);
  EXPECT_EQ(a.finished->kv.kept, b.finished->kv.kept);
  ASSERT_EQ(a.evictions.size(), b.evictions.size());
  for (size_t i = 0; i < a.evictions.size(); ++i) {
    EXPECT_EQ(a.evictions[i].at_token, b.evictions[i].at_token);
    ASSERT_EQ(a.evictions[i].victims.size(), b.evictions[i].victims.size());
    for (size_t v = 0; v < a.evictions[i].victims.size(); ++v) {
      EXPECT_EQ(a.evictions[i].victims[v].index, b.evictions[i].victims[v].index);
    }
  }
}

// Looks at a prompt once it is cached, at its newest queries at most.
bool LooksAtTheEnd(const PolicyTraits& traits) {
  PolicyTraits others = traits;
  others.signals = others.signals.Without(Signal::kQueries);
  return traits.prompt == PromptEviction::kAtEnd && !MeasuresPrompt(others);
}

class EveryPolicyWithPrefixes : public EveryPolicy {
 protected:
  // Of `tokens` that are known: no lane may have been over its budget before.
  static int64_t Expected(const EngineHarness& harness, const RequestOptions& options,
                          int64_t tokens) {
    const Request request = std::get<Request>(harness.admission().Resolve(options));
    if (LooksAtTheEnd(request.traits)) {
      const int64_t window = std::max<int64_t>(request.traits.window, 1);
      const int64_t most = std::max<int64_t>(0, std::ssize(request.prompt) - window);
      return std::min(tokens, most / kDeterministicRows * kDeterministicRows);
    }
    if (MeasuresPrompt(request.traits)) return 0;
    const std::vector<int64_t>& budget = request.demand.budget;
    return std::min(tokens, *std::min_element(budget.begin(), budget.end()) / kDeterministicRows *
                                kDeterministicRows);
  }
};

// The same bits as without the cache, whoever left the prefix there, rounds and all.
TEST_P(EveryPolicyWithPrefixes, AHitGivesTheBitsOfComputing) {
  EngineHarness cached =
      Harness({.deterministic = true, .max_prefix_bytes = kRoom, .end_tokens = false});
  EngineHarness computed = Harness({.deterministic = true, .end_tokens = false});
  RequestOptions first;
  first.prompt = Prompt(cached.manifest(), 48, 22, 0);
  first.stop.max_output_tokens = 4;
  ASSERT_EQ(HitOf(cached.Run(first)), 0);

  RequestOptions options;
  options.prompt = Prompt(cached.manifest(), 48, 22, 1);
  options.stop.max_output_tokens = 120;
  options.sampling = {.temperature = 0.8f, .seed = 5};
  options.output.logprobs = true;
  options.output.residual_steps = true;
  options = WithPolicy(options, policy(), 96);
  const Transcript hit = cached.Run(options);
  ASSERT_TRUE(Evicted(hit, cached.manifest()));
  EXPECT_EQ(HitOf(hit), Expected(cached, options, 48));
  ExpectSameRun(hit, computed.Run(options));

  // And from its own prompt's blocks, all but the last token's.
  const Transcript again = cached.Run(options);
  EXPECT_EQ(HitOf(again), Expected(cached, options, 64));
  ExpectSameRun(again, hit);
}

// Nothing that would have been evicted on the way is copied, and what is left after a round is not
// kept for others.
TEST_P(EveryPolicyWithPrefixes, PromptsOverTheBudgetShareWhatPrecedesTheFirstRound) {
  HarnessOptions how{.prefill_chunk_tokens = 32, .deterministic = true, .end_tokens = false};
  EngineHarness computed = Harness(how);
  how.max_prefix_bytes = kRoom;
  EngineHarness cached = Harness(how);
  RequestOptions options;
  options.prompt = Text(cached.manifest(), 200, 37);
  options.stop.max_output_tokens = 20;
  options.output.logprobs = true;
  options = WithPolicy(options, policy(), 64);
  if (std::holds_alternative<Rejection>(cached.admission().Resolve(options))) {
    GTEST_SKIP() << "this policy takes no prompt over its budget";
  }
  const Transcript plain = computed.Run(options);
  ExpectSameRun(cached.Run(options), plain);
  ExpectSameRun(cached.Run(options), plain);

  RequestOptions whole;
  whole.prompt = options.prompt;
  whole.stop.max_output_tokens = 20;
  whole.output.logprobs = true;
  ExpectSameRun(cached.Run(whole), computed.Run(whole));
}

// Of a policy that evicts a prompt while it is cached and measures nothing on the way, what it has
// left is gone on from: with the bits, the kept tokens and the figures of computing.
TEST_P(EveryPolicyWithPrefixes, WhatIsLeftOfAPromptIsGoneOnFrom) {
  HarnessOptions how{.prefill_chunk_tokens = 32, .deterministic = true, .end_tokens = false};
  EngineHarness computed = Harness(how);
  how.max_prefix_bytes = kRoom;
  EngineHarness cached = Harness(how);
  RequestOptions options;
  options.prompt = Text(cached.manifest(), 200, 37);
  options.stop.max_output_tokens = 40;
  options.sampling = {.temperature = 0.8f, .seed = 5};
  options = WithPolicy(options, policy(), 64);
  options.output = {.logprobs = true, .residual_steps = true, .kept = true};
  const auto resolved = cached.admission().Resolve(options);
  if (std::holds_alternative<Rejection>(resolved)) {
    GTEST_SKIP() << "this policy takes no prompt over its budget";
  }
  const PolicyTraits& traits = std::get<Request>(resolved).traits;
  const bool leaves = traits.prompt == PromptEviction::kByChunk && !MeasuresPrompt(traits) &&
                      !traits.rounds_rows && !traits.pass.any();
  auto expect_same = [&](const RequestOptions& asked, int64_t hit) {
    const Transcript a = cached.Run(asked), b = computed.Run(asked);
    ExpectSameRun(a, b);
    if (leaves) {
      EXPECT_EQ(HitOf(a), hit);
    }
    EXPECT_EQ(a.finished->kv.rounds, b.finished->kv.rounds);
    EXPECT_EQ(a.finished->kv.evicted_entries, b.finished->kv.evicted_entries);
    EXPECT_EQ(a.finished->kv.peak_entries, b.finished->kv.peak_entries);
    EXPECT_EQ(a.finished->kv.peak_bytes, b.finished->kv.peak_bytes);
  };
  const Transcript first = cached.Run(options);
  ExpectSameRun(first, computed.Run(options));
  expect_same(options, 192);

  // Other questions behind one document: the second leaves what it shares with the first, and the
  // third goes on from there.
  RequestOptions others = options;
  std::copy_n(Text(cached.manifest(), 60, 38).begin(), 60, others.prompt.end() - 60);
  std::rotate(others.prompt.end() - 60, others.prompt.end() - 30, others.prompt.end());
  const Transcript second = cached.Run(others);
  ExpectSameRun(second, computed.Run(others));
  std::rotate(others.prompt.end() - 60, others.prompt.end() - 20, others.prompt.end());
  expect_same(others, 128);
}

INSTANTIATE_TEST_SUITE_P(Prefixes, EveryPolicyWithPrefixes,
                         ::testing::Combine(::testing::Values("gqa", "gqa_bf16_int8"),
                                            ::testing::ValuesIn(EvictingPolicies())),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(NightlyPrefixes, EveryPolicyWithPrefixes,
                         ::testing::Combine(::testing::Values("gqa_bf16", "gqa_int8", "sample"),
                                            ::testing::ValuesIn(EvictingPolicies())),
                         CaseName);

class PrefixTest : public ::testing::Test {
 protected:
  static EngineHarness Harness(HarnessOptions options = {}) {
    if (options.max_prefix_bytes == 0) options.max_prefix_bytes = kRoom;
    options.prefill_chunk_tokens = 32;
    options.end_tokens = false;
    return EngineHarness(ModelPath("gqa"), std::move(options));
  }
  static RequestOptions Asked(const EngineHarness& harness, int which = 0) {
    RequestOptions options;
    options.prompt = Prompt(harness.manifest(), 96, 20, which);
    options.stop.max_output_tokens = 8;
    options.output.logprobs = true;
    return options;
  }
};

TEST_F(PrefixTest, OfTheSameSaltAlone) {
  EngineHarness harness = Harness();
  RequestOptions options = Asked(harness);
  harness.Run(options);
  EXPECT_EQ(HitOf(harness.Run(options)), 96);
  options.kv.prefix_salt = "pepper";
  EXPECT_EQ(HitOf(harness.Run(options)), 0);
  EXPECT_EQ(HitOf(harness.Run(options)), 96);
}

TEST_F(PrefixTest, WhoBypassesNeitherTakesNorLeavesAnything) {
  EngineHarness harness = Harness();
  RequestOptions options = Asked(harness);
  options.kv.bypass_prefix_cache = true;
  harness.Run(options);
  EXPECT_EQ(harness.executor().prefix_bytes(), 0);
  options.kv.bypass_prefix_cache = false;
  EXPECT_EQ(HitOf(harness.Run(options)), 0);
  options.kv.bypass_prefix_cache = true;
  EXPECT_EQ(HitOf(harness.Run(options)), 0);
}

TEST_F(PrefixTest, NotAtPositionsOfTheCache) {
  EngineHarness harness = Harness();
  RequestOptions options = Asked(harness);
  harness.Run(options);
  options.kv = {
      .policy = "streaming_llm", .budget = int64_t{64}, .positions = PositionMode::kCache};
  EXPECT_EQ(HitOf(harness.Run(options)), 0);
}

TEST_F(PrefixTest, LogprobsOfAPromptNeedItsForward) {
  EngineHarness harness = Harness();
  RequestOptions options = Asked(harness);
  harness.Run(options);
  options.output.prompt_logprobs = true;
  const Transcript all = harness.Run(options);
  EXPECT_EQ(HitOf(all), 0);
  EXPECT_EQ(all.prompt.tokens.size(), options.prompt.size() - 1);
}

TEST_F(PrefixTest, ScoresHitToo) {
  EngineHarness harness = Harness();
  RequestOptions options = Asked(harness);
  const Transcript generated = harness.Run(options);
  options.forced = generated.tokens;
  const Transcript scored = harness.Run(options);
  EXPECT_EQ(HitOf(scored), 96);
  EXPECT_EQ(scored.logprobs, generated.logprobs) << "alone, from the same chunk on";
  options.force_in_chunks = true;
  EXPECT_EQ(HitOf(harness.Run(options)), 96);
}

// The next turn of a chat: all that was cached of the history is there, but for the last answer's
// last token, which no step has run.
TEST_F(PrefixTest, AChatsHistoryIsPrefilledOnce) {
  EngineHarness harness = Harness();
  RequestOptions options = Asked(harness);
  int64_t known = 0;
  for (int turn = 0; turn < 3; ++turn) {
    options.output.progress = true;
    const Transcript answer = harness.Run(options);
    ASSERT_TRUE(answer.ok());
    EXPECT_EQ(HitOf(answer), known);
    options.prompt.insert(options.prompt.end(), answer.tokens.begin(), answer.tokens.end());
    known = static_cast<int64_t>(options.prompt.size() - 1) / 32 * 32;
    const std::vector<int32_t> more = Text(harness.manifest(), 30, turn);
    options.prompt.insert(options.prompt.end(), more.begin(), more.end());
  }
}

// Up to the first round, and as if it had been prefilled but for the last bits.
TEST_F(PrefixTest, AChatsAnswersAreThereToo) {
  EngineHarness harness = Harness();
  RequestOptions options = Asked(harness);
  options.stop.max_output_tokens = 80;
  options.kv = {.policy = "streaming_llm", .budget = int64_t{170}};
  const auto prompt_tokens = static_cast<int64_t>(options.prompt.size());
  const Transcript answer = harness.Run(options);
  ASSERT_GT(answer.finished->kv.evicted_entries, 0);
  options.prompt.insert(options.prompt.end(), answer.tokens.begin(), answer.tokens.end());
  const std::vector<int32_t> more = Text(harness.manifest(), 30, 5);
  options.prompt.insert(options.prompt.end(), more.begin(), more.end());
  options.kv = {};
  const Transcript next = harness.Run(options);
  EXPECT_EQ(HitOf(next), 160);
  EXPECT_GT(HitOf(next), prompt_tokens);
  options.kv.bypass_prefix_cache = true;
  const Transcript computed = harness.Run(options);
  EXPECT_EQ(next.tokens, computed.tokens);
  ASSERT_EQ(next.logprobs.size(), computed.logprobs.size());
  for (size_t i = 0; i < next.logprobs.size(); ++i) {
    EXPECT_NEAR(next.logprobs[i], computed.logprobs[i], 1e-4);
  }
}

TEST_F(PrefixTest, DeterministicRunsShareNothingThatWasDecoded) {
  EngineHarness harness = Harness({.deterministic = true});
  RequestOptions options = Asked(harness);
  const auto prompt_tokens = static_cast<int64_t>(options.prompt.size());
  const Transcript answer = harness.Run(options);
  options.stop.max_output_tokens = 80;
  options.prompt.insert(options.prompt.end(), answer.tokens.begin(), answer.tokens.end());
  EXPECT_EQ(HitOf(harness.Run(options)), prompt_tokens / kDeterministicRows * kDeterministicRows);
}

// Requests are admitted as if nothing were cached, and what is cached never takes what is reserved.
TEST_F(PrefixTest, CachedPrefixesGiveWay) {
  EngineHarness probe = Harness();
  RequestOptions large = Asked(probe);
  large.prompt = Text(probe.manifest(), 300, 3);
  const int64_t bytes =
      std::get<Request>(probe.admission().Resolve(large)).demand.peak_bytes() + 1024;
  EngineHarness harness = Harness({.kv_pool_bytes = bytes, .max_prefix_bytes = bytes});
  int64_t most = 0;
  auto check = [&] {
    const Ledger& ledger = harness.engine().ledger();
    const int64_t cached = harness.executor().prefix_bytes();
    most = std::max(most, cached);
    EXPECT_LE(ledger.reserved() + cached, ledger.capacity());
    EXPECT_LE(harness.executor().used_bytes(), ledger.reserved());
  };
  harness.OnStep(check);
  for (int i = 0; i < 12; ++i) {
    RequestOptions small = Asked(harness, i % 3);
    small.kv.prefix_salt = std::to_string(i / 3);
    ASSERT_TRUE(harness.Run(small).ok());
  }
  EXPECT_GT(most, bytes / 2);
  const auto first = harness.Submit(large);
  harness.engine().Step();
  EXPECT_EQ(harness.engine().running(), 1) << "admitted at once";
  harness.RunAll();
  ASSERT_TRUE(first->ok());
  EXPECT_EQ(harness.engine().ledger().reserved(), 0);
  EXPECT_EQ(harness.executor().used_bytes(), 0);
}

TEST_F(PrefixTest, ThePoolIsWholeOnceTheyAreDropped) {
  EngineHarness harness = Harness();
  const KvPool& pool = harness.executor().pool();
  harness.Run(Asked(harness));
  EXPECT_LT(pool.free_rows(), pool.num_rows());
  harness.engine().DropPrefixes();
  EXPECT_EQ(pool.free_rows(), pool.num_rows());
  EXPECT_EQ(harness.executor().prefix_bytes(), 0);
  EXPECT_EQ(HitOf(harness.Run(Asked(harness))), 0);
  EXPECT_EQ(HitOf(harness.Run(Asked(harness))), 96);
}

// Its first blocks are dropped while it runs: it goes on, and what it keeps of the rest can be
// reached from nowhere else.
TEST_F(PrefixTest, DroppedWhileAPromptIsCached) {
  EngineHarness harness = Harness({.max_step_tokens = 32});
  const RequestOptions options = Asked(harness);
  const auto running = harness.Submit(options);
  harness.engine().Step();
  EXPECT_GT(harness.executor().prefix_bytes(), 0);
  harness.engine().DropPrefixes();
  harness.RunAll();
  ASSERT_TRUE(running->ok());
  EXPECT_EQ(harness.executor().prefix_bytes(), 0);
  EXPECT_EQ(HitOf(harness.Run(options)), 0);
  EXPECT_EQ(HitOf(harness.Run(options)), 96);
}

// A forward whose logits are no numbers leaves nothing for others.
TEST_F(PrefixTest, WhatFailedIsNotKept) {
  EngineHarness harness = Harness();
  RequestOptions options = Asked(harness);
  options.prompt.resize(32);
  harness.model().SetMeddle([](const at::Tensor&, at::Tensor& q, at::Tensor& k, at::Tensor& v,
                               int64_t) { v = v * std::numeric_limits<float>::quiet_NaN(); });
  EXPECT_FALSE(harness.Run(options).ok());
  harness.model().SetMeddle(nullptr);
  EXPECT_EQ(harness.executor().prefix_bytes(), 0);
}

// Outside deterministic mode decoded rows are cached as well: not those that a policy has rounded.
TEST(Prefixes, RoundedOutputIsNotCachedForOthers) {
  EngineHarness harness(ModelPath("gqa"), {.prefill_chunk_tokens = 16, .max_prefix_bytes = kRoom});
  const std::vector<int32_t> prompt = Prompt(harness.manifest(), 32, 8, 0);
  auto cached_after = [&](const std::vector<int64_t>& bits) {
    RequestOptions options;
    options.prompt = prompt;
    options.stop.max_output_tokens = 100;
    options.kv.policy = "thinkv_tbe";
    options.kv.budget = int64_t{1000};
    options.kv.params = {
        {"layers", std::vector<int64_t>{0}}, {"theta1", 0.0}, {"theta2", 1.0}, {"bits", bits}};
    const Transcript told = harness.Run(options);
    EXPECT_TRUE(told.ok()) << told.finished->status;
    EXPECT_EQ(told.finished->kv.packed_bytes > 0, !bits.empty());
    RequestOptions next;
    next.prompt = prompt;
    next.prompt.insert(next.prompt.end(), told.tokens.begin(), told.tokens.end());
    next.stop.max_output_tokens = 1;
    return HitOf(harness.Run(next));
  };
  EXPECT_LE(cached_after({2, 2, 2}), std::ssize(prompt));
  EXPECT_GT(cached_after({}), std::ssize(prompt));
}

}  // namespace prefix_laws_test
}  // namespace epikv
