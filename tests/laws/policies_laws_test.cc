// The laws of DESIGN section 8 over every policy: each test names its law.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>

#include "tests/fixtures/engine_harness.h"
#include "tests/fixtures/forwarding_executor.h"
#include "tests/fixtures/law_cases.h"
#include "tests/fixtures/law_model.h"
#include "tests/fixtures/probe_policy.h"
#include "tests/fixtures/ragged_policy.h"
#include "tests/fixtures/trace_replay.h"

namespace epikv {
namespace policies_laws_test {

class EveryPolicyOfInt8 : public EveryPolicy {};

class EveryPolicyInFp32 : public EveryPolicy {
 protected:
  // Of logits. Where an element of K or V is half-way between two integers, its last digits decide
  // which one is cached: most runs are within 1e-4 of int8 too, the farthest seen was .03 off.
  double tolerance() const { return kv_dtype() == KvDType::kInt8 ? 0.1 : 1e-4; }
};

// Law 2: a budget that holds everything gives the same bits as `full`.
TEST_P(EveryPolicy, Law2_EnoughBudgetGivesTheBitsOfFull) {
  if (RoundsRows(policy())) GTEST_SKIP() << "rows are rounded whatever the budget";
  EngineHarness harness = Harness();
  RequestOptions options = Scoring(harness.manifest(), 40, 60, 7);
  ASSERT_TRUE(harness.Run(options).ok());
  const std::vector<at::Tensor> full = harness.model().TakeLogits();
  // 200, so that lanes with half of it hold 99 tokens too.
  const Transcript transcript = harness.Run(WithPolicy(options, policy(), 200));
  ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
  EXPECT_EQ(transcript.finished->kv.rounds, 0);
  EXPECT_TRUE(SameBits(full, harness.model().TakeLogits()));
}

// Lanes that share a budget.
int64_t LanesPerPool(const PolicyTraits& traits, const Manifest& manifest) {
  if (traits.pool == Pool::kLane) return 1;
  return manifest.num_kv_heads * (traits.pool == Pool::kModel ? manifest.num_layers() : 1);
}

// Law 3: kept is a subset of cached, protected of kept; used <= budget after each round and <= the
// reserved peak always. (Columns stay with their tokens: RaggedPolicy checks its own each round.)
TEST_P(EveryPolicy, Law3_RoundsMeetTheBudgetAndSpareTheProtected) {
  EngineHarness harness = Harness();
  constexpr int64_t kPrompt = 24, kForced = 200, kBudget = 64;
  const RequestOptions options =
      WithPolicy(Scoring(harness.manifest(), kPrompt, kForced, 11), policy(), kBudget);
  auto resolved = harness.admission().Resolve(options);
  ASSERT_TRUE(std::holds_alternative<Request>(resolved)) << std::get<Rejection>(resolved).message;
  const Request& request = std::get<Request>(resolved);

  const auto transcript = harness.Submit(options);
  harness.OnStep([&] {
    EXPECT_LE(harness.executor().used_bytes(), harness.engine().ledger().reserved());
    EXPECT_LE(harness.engine().ledger().reserved(), harness.engine().ledger().capacity());
  });
  harness.RunAll();
  ASSERT_TRUE(Evicted(*transcript, harness.manifest()));
  const KvUsage& kv = transcript->finished->kv;
  EXPECT_LE(kv.peak_bytes, request.demand.peak_bytes());

  TraceReplay replay(harness.manifest(), kPrompt + kForced);
  ASSERT_EQ(static_cast<int64_t>(transcript->evictions.size()), kv.rounds);
  for (const EvictionTrace& trace : transcript->evictions) {
    ASSERT_TRUE(replay.Apply(trace)) << "a victim was not cached";
    const int64_t pool = LanesPerPool(request.traits, harness.manifest());
    for (int64_t first = 0; first < replay.num_lanes(); first += pool) {
      int64_t held = 0, budget = 0;
      for (int64_t lane = first; lane < first + pool; ++lane) {
        held += replay.Held(lane, trace.at_token);
        budget += request.demand.budget[lane];
      }
      EXPECT_LE(held, budget);
    }
  }
  int64_t evicted = 0;
  for (const auto& d : replay.dropped) {
    EXPECT_FALSE(request.protection.Covers(d.index, d.at_token))
        << "protected token " << d.index << " dropped at " << d.at_token;
    ++evicted;
  }
  EXPECT_EQ(evicted, kv.evicted_entries);
  std::set<int32_t> kept;
  const int64_t newest = kPrompt + kForced - 2;
  for (int64_t lane = 0; lane < replay.num_lanes(); ++lane) {
    for (int64_t i = 0; i <= newest; ++i) {
      if (replay.dropped_at(lane)[i] > newest) kept.insert(static_cast<int32_t>(i));
    }
  }
  EXPECT_EQ(std::vector<int32_t>(kept.begin(), kept.end()), kv.kept);
}

// How many rounds there were, whether MayRound had told of them, and how often it told of none.
struct Foretold {
  int64_t rounds = 0, untold = 0, none = 0;
};

class ForetellingExecutor final : public ForwardingExecutor {
 public:
  ForetellingExecutor(std::unique_ptr<StepExecutor> executor, Foretold& counts)
      : ForwardingExecutor(std::move(executor)), counts_(counts) {}

  absl::StatusOr<std::vector<ForwardOutcome>> Forward(absl::Span<const WorkItem> items) override {
    for (const WorkItem& item : items) {
      const bool may = MayRound(item);
      told_[item.id] = may;
      counts_.none += may ? 0 : 1;
    }
    return ForwardingExecutor::Forward(items);
  }
  std::vector<SettleOutcome> Settle(absl::Span<const WorkItem> items) override {
    std::vector<SettleOutcome> outcomes = ForwardingExecutor::Settle(items);
    for (size_t i = 0; i < items.size(); ++i) {
      if (outcomes[i].eviction_time == absl::ZeroDuration()) continue;
      ++counts_.rounds;
      counts_.untold += told_.at(items[i].id) ? 0 : 1;
    }
    return outcomes;
  }

 private:
  Foretold& counts_;
  std::map<SequenceId, bool> told_;
};

// What the engine plans steps by: no round comes that was not told, in prompts, in decode, and
// after scratch passes; and most steps are known to have none.
TEST_P(EveryPolicy, RoundsAreForetold) {
  Foretold counts;
  EngineHarness harness =
      Harness({.prefill_chunk_tokens = 32, .wrap = [&](std::unique_ptr<StepExecutor> executor) {
                 return std::make_unique<ForetellingExecutor>(std::move(executor), counts);
               }});
  for (const int64_t prompt : {24, 130}) {
    const RequestOptions options =
        WithPolicy(Scoring(harness.manifest(), prompt, 100, 11), policy(), 64);
    const auto resolved = harness.admission().Resolve(options);
    if (prompt > 64 && std::holds_alternative<Rejection>(resolved)) continue;  // it may refuse them
    const Transcript transcript = harness.Run(options);
    ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
  }
  EXPECT_GE(counts.rounds, 5);
  EXPECT_EQ(counts.untold, 0);
  EXPECT_GE(counts.none, 10);
}

// A policy that reads keys or queries cannot do with positions that change.
bool RefusesPositions(const EngineHarness& harness, const RequestOptions& options) {
  const auto resolved = harness.admission().Resolve(options);
  if (std::holds_alternative<Request>(resolved)) return false;
  EXPECT_EQ(options.kv.positions, PositionMode::kCache);
  EXPECT_EQ(std::get<Rejection>(resolved).violations.front().field, "kv.positions");
  return true;
}

// Law 5: what the engine computes over reused slots, filled holes and packed lanes is what the
// definition gives: plain attention over every token, under a mask of what is kept.
TEST_P(EveryPolicyInFp32, Law5_SlotsHolesAndPackedLanesEqualTheMask) {
  if (RoundsRows(policy())) GTEST_SKIP() << "the mask is over rows as they were cached";
  for (PositionMode positions :
       {PositionMode::kAbsolute, PositionMode::kCompact, PositionMode::kCache}) {
    EngineHarness harness = Harness();
    RequestOptions options = WithPolicy(Scoring(harness.manifest(), 24, 120, 13), policy(), 64);
    options.kv.positions = positions;
    if (RefusesPositions(harness, options)) continue;
    const Transcript transcript = harness.Run(options);
    ASSERT_TRUE(Evicted(transcript, harness.manifest()));
    const std::vector<at::Tensor> logits = harness.model().TakeLogits();

    TraceReplay replay(harness.manifest(), 24 + 120);
    for (const EvictionTrace& trace : transcript.evictions) ASSERT_TRUE(replay.Apply(trace));
    const std::vector<MaskedReference::Step> steps =
        MaskedReference(harness.model(), kv_dtype())
            .Run(CachedTokens(options), replay.dropped, positions);
    std::vector<at::Tensor> expected;  // from the prompt's last token on
    for (size_t t = options.prompt.size() - 1; t < steps.size(); ++t) {
      expected.push_back(steps[t].logits);
    }
    // Where a policy asks for entropies, the prompt's other tokens have logits too: before these.
    const size_t more = logits.size() - std::min(logits.size(), expected.size());
    EXPECT_LT(LargestDifference({logits.begin() + more, logits.end()}, expected), tolerance());
  }
}

// Law 5 where lanes share budgets and rounds end below them: lanes of any lengths keep all the room
// that there is, round after round.
TEST(Pools, RoundsThatEndBelowTheBudgetLoseNoRoom) {
  for (const char* allocator : {"head_pool", "model_pool"}) {
    SCOPED_TRACE(allocator);
    EngineHarness harness(ModelPath("gqa"), {});
    const PolicyCase policy{"",
                            "snapkv",
                            {{"allocator", std::string(allocator)},
                             {"select", std::string("threshold")},
                             {"threshold", 0.012},
                             {"window", int64_t{8}},
                             {"slack", int64_t{3}}}};
    RequestOptions options = WithPolicy(Scoring(harness.manifest(), 24, 200, 13), policy, 64);
    options.kv.protection.recent = 8;
    const Transcript transcript = harness.Run(options);
    ASSERT_TRUE(Evicted(transcript, harness.manifest()));
    const std::vector<at::Tensor> logits = harness.model().TakeLogits();
    TraceReplay replay(harness.manifest(), 24 + 200);
    for (const EvictionTrace& trace : transcript.evictions) ASSERT_TRUE(replay.Apply(trace));
    std::vector<at::Tensor> expected;
    const auto steps = MaskedReference(harness.model()).Run(CachedTokens(options), replay.dropped);
    for (size_t t = options.prompt.size() - 1; t < steps.size(); ++t) {
      expected.push_back(steps[t].logits);
    }
    EXPECT_LT(LargestDifference(logits, expected), 1e-4);
  }
}

// In a text words recur, and equal words have keys and values whose sizes differ by rounding alone:
// which of them goes is open. Here each word of the vocabulary comes once, but for the special
// ones.
RequestOptions EachWordOnce(const Manifest& manifest, RequestOptions options) {
  constexpr int32_t kSpecial = 4;
  std::vector<int32_t> words(manifest.vocab_size - kSpecial);
  std::iota(words.begin(), words.end(), kSpecial);
  std::shuffle(words.begin(), words.end(), std::mt19937_64(17));
  const size_t prompt = options.prompt.size();
  EXPECT_GE(words.size(), prompt + options.forced.size());
  std::copy_n(words.begin(), prompt, options.prompt.begin());
  std::copy_n(words.begin() + prompt, options.forced.size(), options.forced.begin());
  return options;
}

// Law 5: prompt chunks of any size, and lanes that were moved, change nothing.
TEST_P(EveryPolicyInFp32, Law5_ChunkedPrefillAndMovedLanesChangeNothing) {
  const Manifest manifest = EngineHarness(ModelPath(model())).manifest();
  RequestOptions options = WithPolicy(Scoring(manifest, 40, 120, 17), policy(), 96);
  const std::set<std::string> ties = {"dms", "knorm", "kvzap", "thinkv_tbe", "vase"};
  if (model() == "sample" && ties.contains(policy().policy)) {
    options = EachWordOnce(manifest, std::move(options));
  }
  std::vector<std::vector<at::Tensor>> logits;
  std::vector<std::vector<int32_t>> kept;
  for (int64_t step_tokens : {512, 17}) {
    EngineHarness harness = Harness({.max_step_tokens = step_tokens});
    const Transcript transcript = harness.Run(options);
    ASSERT_TRUE(Evicted(transcript, manifest));
    logits.push_back(harness.model().TakeLogits());
    kept.push_back(transcript.finished->kv.kept);
  }
  {
    // A neighbour ends when this one is at its budget, and a larger one waits: the pool is so small
    // that room for it is made by moving the lanes.
    EngineHarness probe = Harness();
    auto demand = [&](const RequestOptions& o) {
      return std::get<Request>(probe.admission().Resolve(o)).demand.peak_bytes();
    };
    RequestOptions small, large;
    small.prompt = Text(manifest, 220, 18);
    small.stop.max_output_tokens = 80;
    large.prompt = Text(manifest, 306, 19);
    large.stop.max_output_tokens = 4;
    ASSERT_LT(demand(small), demand(large));
    EngineHarness harness = Harness({.kv_pool_bytes = demand(options) + demand(large) + 4096});
    const auto first = harness.Submit(small);
    const auto watched = harness.Submit(options);
    const auto third = harness.Submit(large);
    harness.RunAll();
    ASSERT_TRUE(first->ok() && watched->ok() && third->ok());
    // Beside some policies' state rows are so small a part of the pool that they need no moving.
    const std::set<std::string> roomy =
        kv_dtype() == KvDType::kInt8
            ? std::set<std::string>{"expected_attention", "infokv", "probe", "skipkv"}
            : std::set<std::string>{"probe"};
    EXPECT_TRUE(roomy.contains(policy().policy) || harness.executor().pool().rows_moved() > 0);
    EXPECT_GT(first->finished->output_tokens, 96 - 40);
    kept.push_back(watched->finished->kv.kept);
    const Transcript alone = harness.Run(options);
    ASSERT_EQ(alone.logprobs.size(), watched->logprobs.size());
    for (size_t i = 0; i < alone.logprobs.size(); ++i) {
      EXPECT_NEAR(alone.logprobs[i], watched->logprobs[i], tolerance());
    }
  }
  EXPECT_LT(LargestDifference(logits[0], logits[1]), tolerance());
  EXPECT_EQ(kept[0], kept[1]);
  EXPECT_EQ(kept[0], kept[2]);
}

// Law 4: in deterministic mode a request's tokens and bits are the same alone and in any batch.
TEST_P(EveryPolicy, Law4_DeterministicModeIgnoresTheBatch) {
  EngineHarness harness = Harness({.deterministic = true, .end_tokens = false});
  RequestOptions options;
  options.prompt = Text(harness.manifest(), 37, 23);
  options.stop.max_output_tokens = 130;
  options.sampling = {.temperature = 0.8f, .seed = 5};
  options.output.logprobs = true;
  options = WithPolicy(options, policy(), 80);
  const Transcript alone = harness.Run(options);
  ASSERT_TRUE(Evicted(alone, harness.manifest()));

  std::mt19937_64 rng(29);
  const std::vector<PolicyCase> others = EvictingPolicies();
  for (int round = 0; round < 2; ++round) {
    std::shared_ptr<Transcript> watched;
    for (int i = 0; i < 9; ++i) {
      RequestOptions neighbour;
      neighbour.prompt = Text(harness.manifest(), 20 + rng() % 60, rng());
      neighbour.stop.max_output_tokens = 10 + rng() % 150;
      neighbour.sampling = {.temperature = 1.0f, .seed = rng()};
      neighbour = WithPolicy(neighbour, others[rng() % others.size()], 160);
      if (i == 4) watched = harness.Submit(options);
      harness.Submit(neighbour);
      for (uint64_t steps = rng() % 5; steps > 0; --steps) harness.engine().Step();
    }
    harness.RunAll();
    ASSERT_TRUE(watched->ok()) << watched->finished->status;
    EXPECT_EQ(watched->tokens, alone.tokens);
    EXPECT_EQ(watched->logprobs, alone.logprobs);
    EXPECT_EQ(watched->finished->kv.kept, alone.finished->kv.kept);
  }
}

// K and V of int8 are those of the policy's, too: one that reads nothing of them, nor of what
// attention makes of them, keeps the same tokens as in the model's dtype. Of the others it is told
// how many they have in common.
TEST_P(EveryPolicyOfInt8, WhatInt8KeepsDiffersOnlyByWhatIsRead) {
  const RequestOptions options =
      WithPolicy(Scoring(EngineHarness(ModelPath(model())).manifest(), 24, 160, 71), policy(), 64);
  std::vector<std::vector<int32_t>> kept;
  SignalSet signals;
  for (KvDType stored : {KvDType::kModel, KvDType::kInt8}) {
    EngineHarness harness(ModelPath(model()), {.kv_dtype = stored, .policies = LawPolicies()});
    const Transcript transcript = harness.Run(options);
    ASSERT_TRUE(Evicted(transcript, harness.manifest()));
    kept.push_back(transcript.finished->kv.kept);
    signals = std::get<Request>(harness.admission().Resolve(options)).traits.signals;
  }
  std::vector<int32_t> common;
  std::set_intersection(kept[0].begin(), kept[0].end(), kept[1].begin(), kept[1].end(),
                        std::back_inserter(common));
  RecordProperty("kept", static_cast<int>(kept[0].size()));
  RecordProperty("in_common", static_cast<int>(common.size()));
  if (signals.Names().empty()) {
    EXPECT_EQ(kept[0], kept[1]);
  }
}

// Scoring what Generate gave returns its log-probabilities, bit for bit in deterministic mode.
TEST_P(EveryPolicy, Law4_ScoringGeneratedTokensReturnsTheirLogprobs) {
  EngineHarness harness = Harness({.deterministic = true, .end_tokens = false});
  RequestOptions options;
  options.prompt = Text(harness.manifest(), 30, 31);
  options.stop.max_output_tokens = 120;
  options.sampling = {.temperature = 1.0f, .seed = 9};
  options.output.logprobs = true;
  options = WithPolicy(options, policy(), 80);
  const Transcript generated = harness.Run(options);
  ASSERT_TRUE(Evicted(generated, harness.manifest()));
  options.forced = generated.tokens;
  const Transcript scored = harness.Run(options);
  ASSERT_TRUE(scored.ok());
  EXPECT_EQ(scored.logprobs, generated.logprobs);
  EXPECT_EQ(scored.finished->kv.kept, generated.finished->kv.kept);
}

// What a prompt's tokens are given before anything is generated is what scoring them gives: bit for
// bit in deterministic mode, under any policy that has not yet evicted.
TEST_P(EveryPolicy, PromptLogprobsAreThoseOfScoringThePrompt) {
  EngineHarness harness = Harness({.prefill_chunk_tokens = 32, .deterministic = true});
  RequestOptions options;
  options.prompt = Text(harness.manifest(), 40, 61);
  options.stop.max_output_tokens = 80;
  options.output.prompt_logprobs = true;
  options.output.logprobs = true;
  options.output.top_logprobs = 3;
  const Transcript generated =
      harness.Run(WithPolicy(options, policy(), 112));  // of which the leanest lane has 56
  ASSERT_TRUE(generated.ok()) << generated.finished->status;

  RequestOptions scoring;
  scoring.prompt = {options.prompt[0]};
  scoring.forced.assign(options.prompt.begin() + 1, options.prompt.end());
  // One more, so that the chunks are the same: the last scored token is never cached.
  scoring.forced.push_back(generated.tokens[0]);
  scoring.force_in_chunks = true;
  scoring.output.top_logprobs = 3;
  const Transcript scored = harness.Run(scoring);
  ASSERT_TRUE(scored.ok()) << scored.finished->status;
  EXPECT_EQ(generated.prompt.first, 1);
  std::vector<int32_t> tokens = generated.prompt.tokens;
  std::vector<float> logprobs = generated.prompt.logprobs;
  std::vector<std::vector<TokenLogprob>> top = generated.prompt.top;
  tokens.push_back(generated.tokens[0]);
  logprobs.push_back(generated.logprobs[0]);
  top.push_back(generated.top_logprobs[0]);
  EXPECT_TRUE(tokens == scoring.forced);
  EXPECT_TRUE(logprobs == scored.logprobs);
  EXPECT_TRUE(top == scored.top_logprobs);
  for (size_t i = 0; i < scored.logprobs.size(); ++i) {
    ASSERT_EQ(scored.top_logprobs[i].size(), 3u);
    if (!scored.greedy[i]) continue;
    const TokenLogprob likeliest{scoring.forced[i], scored.logprobs[i]};
    EXPECT_EQ(scored.top_logprobs[i].front(), likeliest);
  }
  EXPECT_EQ(generated.top_logprobs.size(), generated.tokens.size());
}

// Prompts over the budget: rounds at multiples of the prefill chunk, whatever the steps' sizes.
TEST_P(EveryPolicy, Law3_PromptsOverTheBudgetAreEvictedAtFixedPlaces) {
  std::vector<std::vector<EvictionTrace>> traces;
  for (int64_t step_tokens : {512, 19}) {
    EngineHarness harness = Harness({.max_step_tokens = step_tokens, .prefill_chunk_tokens = 32});
    RequestOptions options = WithPolicy(Scoring(harness.manifest(), 200, 40, 37), policy(), 64);
    auto resolved = harness.admission().Resolve(options);
    if (const auto* rejection = std::get_if<Rejection>(&resolved)) {
      // It says which budget would do, and that one does.
      EXPECT_EQ(rejection->reason, "KV_BUDGET");
      options.kv.budget = static_cast<int64_t>(std::stoll(rejection->metadata.at("min")));
      const auto larger = harness.admission().Resolve(options);
      ASSERT_TRUE(std::holds_alternative<Request>(larger));
      EXPECT_EQ(std::get<Request>(larger).traits.prompt, PromptEviction::kRefuses)
          << "it can rank a prompt, and does not";
      EXPECT_TRUE(harness.Run(options).ok());
      return;
    }
    const Request& request = std::get<Request>(resolved);
    const Transcript transcript = harness.Run(options);
    ASSERT_TRUE(Evicted(transcript, harness.manifest()));
    EXPECT_LE(transcript.finished->kv.peak_bytes, request.demand.peak_bytes());
    TraceReplay replay(harness.manifest(), 240);
    for (const EvictionTrace& trace : transcript.evictions) {
      ASSERT_TRUE(replay.Apply(trace));
      if (trace.at_token < 199) {
        EXPECT_EQ((trace.at_token + 1) % 32, 0);
      }
    }
    traces.push_back(transcript.evictions);
  }
  ASSERT_EQ(traces[0].size(), traces[1].size());
  for (size_t i = 0; i < traces[0].size(); ++i) {
    EXPECT_EQ(traces[0][i].at_token, traces[1][i].at_token);
  }
}

// Every policy with every change, on all models in the night. In float32 laws 4 and 5 have every
// policy, too: SixteenPolicies, EveryPolicyInFp32.
INSTANTIATE_TEST_SUITE_P(Laws, EveryPolicy,
                         ::testing::Combine(::testing::Values("gqa_bf16", "sample_int8"),
                                            ::testing::ValuesIn(EvictingPolicies())),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(NightlyLaws, EveryPolicy,
                         ::testing::Combine(::testing::Values("gqa", "mha", "mqa", "sample",
                                                              "gqa_int8", "gqa_bf16_int8"),
                                            ::testing::ValuesIn(EvictingPolicies())),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(Laws, EveryPolicyInFp32,
                         ::testing::Combine(::testing::Values("gqa", "sample_int8"),
                                            ::testing::ValuesIn(EvictingPolicies())),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(NightlyLaws, EveryPolicyInFp32,
                         ::testing::Combine(::testing::Values("mha", "mqa", "sample", "gqa_int8"),
                                            ::testing::ValuesIn(EvictingPolicies())),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(Laws, EveryPolicyOfInt8,
                         ::testing::Combine(::testing::Values("sample_int8"),
                                            ::testing::ValuesIn(EvictingPolicies())),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(NightlyLaws, EveryPolicyOfInt8,
                         ::testing::Combine(::testing::Values("gqa_int8", "gqa_bf16_int8"),
                                            ::testing::ValuesIn(EvictingPolicies())),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(NightlyLawsOfVariants, EveryPolicy,
                         ::testing::Combine(::testing::Values("gqa"),
                                            ::testing::ValuesIn(PolicyVariants())),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(LawsOfVariants, EveryPolicyInFp32,
                         ::testing::Combine(::testing::Values("gqa"),
                                            ::testing::ValuesIn(PolicyVariants())),
                         CaseName);

}  // namespace policies_laws_test
}  // namespace epikv
