// Guesses that run ahead change when tokens come, and nothing else: outputs, what policies keep and
// what is reserved are those of a request that guesses nothing, to the bit.

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "tests/fixtures/engine_harness.h"
#include "tests/fixtures/law_cases.h"

namespace epikv {
namespace guess_laws_test {

// One text again and again, so that what comes is often there already.
std::vector<int32_t> Repeated(const Manifest& manifest, int64_t length, uint64_t seed) {
  const std::vector<int32_t> part = Text(manifest, 12, seed);
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < length; ++i) tokens.push_back(part[i % std::ssize(part)]);
  return tokens;
}

RequestOptions Asking(const Manifest& manifest, float temperature) {
  RequestOptions options;
  options.prompt = Repeated(manifest, 40, 23);
  options.stop.max_output_tokens = 150;
  options.sampling = {.temperature = temperature, .top_k = 3, .seed = 5};
  // Where residuals are not asked for, nothing but the policy's own is tapped.
  options.output = {
      .logprobs = true, .kv_trace = true, .residual_steps = temperature > 0, .kept = true};
  return options;
}

void ExpectSame(const Transcript& guessed, const Transcript& plain) {
  ASSERT_TRUE(plain.ok()) << plain.finished->status;
  ASSERT_TRUE(guessed.ok()) << guessed.finished->status;
  EXPECT_EQ(guessed.tokens, plain.tokens);
  EXPECT_EQ(guessed.text, plain.text);
  EXPECT_EQ(guessed.logprobs, plain.logprobs);
  EXPECT_EQ(guessed.residual_steps, plain.residual_steps);
  EXPECT_EQ(guessed.finished->reason, plain.finished->reason);
  const KvUsage &kv = guessed.finished->kv, &kv_plain = plain.finished->kv;
  EXPECT_EQ(kv.kept, kv_plain.kept);
  EXPECT_EQ(kv.rounds, kv_plain.rounds);
  EXPECT_EQ(kv.evicted_entries, kv_plain.evicted_entries);
  EXPECT_EQ(kv.peak_entries, kv_plain.peak_entries);
  EXPECT_GE(kv.peak_bytes, kv_plain.peak_bytes) << "what is measured of guesses has room, too";
  EXPECT_EQ(kv.final_entries, kv_plain.final_entries);
  ASSERT_EQ(guessed.evictions.size(), plain.evictions.size());
  for (size_t i = 0; i < plain.evictions.size(); ++i) {
    EXPECT_EQ(guessed.evictions[i].at_token, plain.evictions[i].at_token);
    ASSERT_EQ(guessed.evictions[i].victims.size(), plain.evictions[i].victims.size());
    for (size_t v = 0; v < plain.evictions[i].victims.size(); ++v) {
      EXPECT_EQ(guessed.evictions[i].victims[v].index, plain.evictions[i].victims[v].index);
    }
  }
}

// Of the rows that attention_mass is measured by: the executor's own.
constexpr int64_t kMassBytes = 1 << 20;

class EveryPolicyGuesses : public EveryPolicy {};

TEST_P(EveryPolicyGuesses, SameOutputsAndSameKeptSets) {
  EngineHarness harness = Harness({.deterministic = true, .mass_interval = 1, .end_tokens = false});
  int64_t accepted = 0;
  for (const float temperature : {0.0f, 0.7f}) {
    for (const int64_t budget : {80, 400}) {
      RequestOptions options =
          WithPolicy(Asking(harness.manifest(), temperature), policy(), budget);
      const size_t rounds = harness.masses().size();
      const Transcript plain = harness.Run(options);
      const std::vector<double> masses(harness.masses().begin() + rounds, harness.masses().end());
      options.guess_tokens = kMostGuesses;
      harness.OnStep([&] {
        EXPECT_LE(harness.executor().used_bytes(), harness.engine().ledger().reserved());
        StepStats step;
        harness.executor().AddPool(step);
        EXPECT_LE(step.signal_bytes, harness.engine().ledger().reserved() + kMassBytes);
      });
      const size_t after = harness.masses().size();
      const Transcript guessed = harness.Run(options);
      harness.OnStep(nullptr);
      ExpectSame(guessed, plain);
      EXPECT_EQ(std::vector<double>(harness.masses().begin() + after, harness.masses().end()),
                masses);
      EXPECT_LE(guessed.finished->accepted_tokens, guessed.finished->guessed_tokens);
      accepted += guessed.finished->accepted_tokens;
    }
  }
  if (!RoundsRows(policy())) {
    EXPECT_GT(accepted, 0);
  }
  EXPECT_EQ(harness.engine().ledger().reserved(), 0);
}

// Nothing is evicted, nothing measured; and what was cached is there for the next.
TEST(FullGuesses, SameOutputsWithCachedPrefixes) {
  for (const bool deterministic : {true, false}) {
    EngineHarness harness(ModelPath("gqa"), {.prefill_chunk_tokens = 32,
                                             .deterministic = deterministic,
                                             .max_prefix_bytes = 1 << 20,
                                             .end_tokens = false});
    RequestOptions options = Asking(harness.manifest(), 0);
    const Transcript plain = harness.Run(options);
    options.guess_tokens = kMostGuesses;
    const Transcript guessed = harness.Run(options);
    ASSERT_TRUE(plain.ok() && guessed.ok());
    EXPECT_EQ(guessed.tokens, plain.tokens);
    EXPECT_GT(guessed.finished->accepted_tokens, 0);
    RequestOptions turn;
    turn.prompt = options.prompt;
    turn.prompt.insert(turn.prompt.end(), guessed.tokens.begin(), guessed.tokens.end());
    turn.stop.max_output_tokens = 1;
    harness.engine().DropPrefixes();
    harness.Run(options);
    const int64_t cached = harness.Run(turn).finished->cached_prompt_tokens;
    EXPECT_EQ(cached, deterministic ? 32 : 160) << "of 189; decoding and reading differ in bits";
  }
}

// How often each last token came, of many seeds.
using Counts = std::map<int32_t, int64_t>;

// How many standard deviations two samples of one size lie further apart than chance has them, by
// the chi-square test of homogeneity and Wilson and Hilferty's cube root. Rare ones count as one.
double Apart(const Counts& one, const Counts& other) {
  constexpr int64_t kRare = 10;
  const auto of = [](const Counts& counts, int32_t token) {
    const auto found = counts.find(token);
    return found == counts.end() ? 0.0 : static_cast<double>(found->second);
  };
  Counts all = one;
  for (const auto& [token, count] : other) all[token] += count;
  double square = 0, bins = 0, rare_one = 0, rare_other = 0;
  const auto add = [&](double a, double b) {
    if (a + b == 0) return;
    square += (a - b) * (a - b) / (a + b);
    ++bins;
  };
  for (const auto& [token, count] : all) {
    if (count >= kRare) {
      add(of(one, token), of(other, token));
    } else {
      rare_one += of(one, token);
      rare_other += of(other, token);
    }
  }
  add(rare_one, rare_other);
  const double freedom = bins - 1, spread = 2 / (9 * freedom);
  return (std::cbrt(square / freedom) - (1 - spread)) / std::sqrt(spread);
}

// Where a batch decides bits, what is drawn has its distribution all the same. Each arm has seeds
// of its own.
TEST(SampledGuesses, LastTokensAreDistributedAsWithout) {
  EngineHarness harness(ModelPath("gqa"), {.end_tokens = false});
  int64_t accepted = 0;
  const auto sample = [&](uint64_t first_seed, float temperature, int64_t guesses) {
    Counts counts;
    for (uint64_t seed = first_seed; seed < first_seed + 800; ++seed) {
      RequestOptions options;
      options.prompt = Repeated(harness.manifest(), 40, 23);
      options.stop.max_output_tokens = 24;
      options.sampling = {.temperature = temperature, .seed = seed};
      options.guess_tokens = guesses;
      const Transcript got = harness.Run(options);
      accepted += got.finished->accepted_tokens;
      ++counts[got.tokens.back()];
    }
    return counts;
  };
  const Counts plain = sample(1, 0.05f, 0);
  EXPECT_EQ(accepted, 0);
  EXPECT_LT(Apart(plain, sample(10001, 0.05f, kMostGuesses)), 5);
  EXPECT_GT(accepted, 100);
  EXPECT_GT(Apart(plain, sample(20001, 0.2f, 0)), 5) << "the test would not see a difference";
}

// Why a request has no guesses although it asks for them; and that it has where there is no reason.
TEST(GuessesLeftOut, EachReasonAlone) {
  EngineHarness harness(ModelPath("gqa"), {.kv_tier_bytes = 1 << 20, .end_tokens = false});
  RequestOptions asks = Asking(harness.manifest(), 0);
  asks.prompt = Repeated(harness.manifest(), 300, 23);
  asks.output = {};
  asks.guess_tokens = 4;
  const auto guesses = [&](const RequestOptions& options) {
    auto resolved = harness.admission().Resolve(options);
    const auto* rejection = std::get_if<Rejection>(&resolved);
    EXPECT_EQ(rejection, nullptr) << rejection->message;
    return rejection == nullptr ? std::get<Request>(resolved).guess_tokens : -1;
  };
  EXPECT_EQ(guesses(asks), 4);
  RequestOptions options = asks;
  options.kv.positions = PositionMode::kCache;
  EXPECT_EQ(guesses(options), 0);
  options = asks;
  options.kv.read_tokens = 128;
  EXPECT_EQ(guesses(options), 0);
  options = asks;
  options.kv = {.policy = "sliding", .budget = int64_t{100}};
  EXPECT_EQ(guesses(options), 4);
  options.kv.tier.tokens = 64;
  EXPECT_EQ(guesses(options), 0);
  options.kv = {};
  options.kv.tier.tokens = 64;
  EXPECT_EQ(guesses(options), 4) << "nothing is evicted, so there is no tier";
  options = asks;
  options.thinking = ThinkingMarks{.tags = {"<think>", "</think>"}};
  EXPECT_EQ(guesses(options), 4);
  options.kv.evict_thinking = true;
  EXPECT_EQ(guesses(options), 0);
  options.kv.evict_thinking = false;
  options.kv.protection.thinking = 3;
  EXPECT_EQ(guesses(options), 0);
  options = asks;
  options.forced = Text(harness.manifest(), 5, 1);
  EXPECT_EQ(guesses(options), 0);
  int64_t rounding = 0;
  for (const PolicyCase& policy : PolicyVariants()) {
    if (!RoundsRows(policy)) continue;
    ++rounding;
    EXPECT_EQ(guesses(WithPolicy(asks, policy, 400)), 0) << policy.label;
  }
  EXPECT_GT(rounding, 0);
}

INSTANTIATE_TEST_SUITE_P(Laws, EveryPolicyGuesses,
                         ::testing::Combine(::testing::Values("gqa"),
                                            ::testing::ValuesIn(EvictingPolicies())),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(NightlyLaws, EveryPolicyGuesses,
                         ::testing::Combine(::testing::Values("sample_int8", "gqa_bf16"),
                                            ::testing::ValuesIn(EvictingPolicies())),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(NightlyLawsOfVariants, EveryPolicyGuesses,
                         ::testing::Combine(::testing::Values("gqa"),
                                            ::testing::ValuesIn(PolicyVariants())),
                         CaseName);

}  // namespace guess_laws_test
}  // namespace epikv
