#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "absl/algorithm/container.h"
#include "policies/registry.h"
#include "tests/fixtures/fake_sequence.h"

namespace epikv {
namespace random_policy_test {

constexpr int64_t kTokens = 60, kBudget = 20, kRuns = 4000;

// How often each token is among the last ones kept, over many seeds.
std::vector<double> Survival(bool frozen) {
  std::vector<double> survival(kTokens);
  for (int64_t seed = 0; seed < kRuns; ++seed) {
    FakeSequence::Options options;
    options.spec = FindPolicy(AllPolicies(), "random");
    options.params = {{"frozen", frozen}};
    options.budget = kBudget;
    options.seed = seed;
    FakeSequence sequence(options, {});
    for (int64_t token = 0; token < kTokens; ++token) {
      sequence.Decode();
      sequence.Round();
    }
    for (int32_t token : sequence.Kept()) survival[token] += 1.0 / kRuns;
  }
  return survival;
}

// Six standard errors of a share estimated from kRuns runs.
double Tolerance(double share) { return 6 * std::sqrt(share * (1 - share) / kRuns) + 1e-9; }

TEST(Random, FreshVictimsAreUniformSoSurvivalDecaysWithAge) {
  const std::vector<double> survival = Survival(/*frozen=*/false);
  // Each round spares all but one of kBudget + 1.
  const double spared = kBudget / (kBudget + 1.0);
  for (int64_t token = 0; token < kTokens; ++token) {
    const double expected = std::pow(spared, kTokens - std::max(token, kBudget));
    EXPECT_NEAR(survival[token], expected, Tolerance(expected)) << "token " << token;
  }
}

TEST(Random, FrozenDrawsKeepAUniformSample) {
  const std::vector<double> survival = Survival(/*frozen=*/true);
  const double expected = static_cast<double>(kBudget) / kTokens;
  for (int64_t token = 0; token < kTokens; ++token) {
    EXPECT_NEAR(survival[token], expected, Tolerance(expected)) << "token " << token;
  }
}

TEST(RandomAttention, SurvivalDecaysWithRoundsAndEveryLaneDrawsAlone) {
  constexpr int64_t kPrompt = 5, kRecent = 8, kRound = 8;
  // How often a token stays in a lane; in it and another of its layer; in it and one of the other.
  std::vector<double> survival(kTokens), with_head(kTokens), with_layer(kTokens);
  for (int64_t seed = 0; seed < kRuns; ++seed) {
    FakeSequence::Options options;
    options.spec = FindPolicy(AllPolicies(), "random_attention");
    options.params = {{"slack", kRound - 1}};
    options.shape = {.num_layers = 2, .num_heads = 2, .num_kv_heads = 2};
    options.protection = {.prompt = kPrompt, .recent = kRecent};
    options.prompt_tokens = kPrompt;
    options.budget = kBudget;
    options.seed = seed;
    FakeSequence sequence(options, {});
    sequence.Prefill(kPrompt);
    while (sequence.newest() < kTokens - 1) {
      sequence.Decode();
      sequence.Round();
    }
    const std::vector<int32_t> in_head = sequence.Kept(0, 1), in_layer = sequence.Kept(1, 0);
    for (int32_t token : sequence.Kept(0, 0)) {
      survival[token] += 1.0 / kRuns;
      if (absl::c_binary_search(in_head, token)) with_head[token] += 1.0 / kRuns;
      if (absl::c_binary_search(in_layer, token)) with_layer[token] += 1.0 / kRuns;
    }
  }
  // A round spares all but kRound of those that are neither of the prompt nor recent.
  const double open = kBudget + kRound - kPrompt - kRecent;
  for (int64_t token = 0; token < kTokens; ++token) {
    int64_t rounds = 0;  // that the token was open in
    for (int64_t newest = kBudget + kRound - 1; newest < kTokens; newest += kRound) {
      rounds += token >= kPrompt && token <= newest - kRecent;
    }
    const double expected = std::pow((open - kRound) / open, rounds);
    EXPECT_NEAR(survival[token], expected, Tolerance(expected)) << "token " << token;
    const double both = expected * expected;
    EXPECT_NEAR(with_head[token], both, Tolerance(both)) << "token " << token;
    EXPECT_NEAR(with_layer[token], both, Tolerance(both)) << "token " << token;
  }
}

TEST(Cur, RowsOfDifferentWidthsHaveNoProjectionInCommon) {
  const PolicySpec& cur = *FindPolicy(AllPolicies(), "cur");
  for (const auto& [projection, violations] :
       std::map<std::string, size_t>{{"none", 0}, {"fixed", 1}, {"resample", 1}}) {
    const ResolvedParams resolved = ResolveParams(
        cur, {{"projection", projection}}, {.num_layers = 1, .key_width = 8, .value_width = 4});
    EXPECT_EQ(resolved.violations.size(), violations) << projection;
  }
}

// Two of four tokens stay, drawn one after the other.
TEST(Vase, DrawsWithoutReplacementInProportionToAttention) {
  const std::vector<double> share = {0.1, 0.2, 0.3, 0.4};  // of the attention, by token
  std::map<std::vector<int32_t>, double> drawn;
  for (int64_t seed = 0; seed < kRuns; ++seed) {
    FakeSequence::Options options;
    options.spec = FindPolicy(AllPolicies(), "vase");
    options.params = {
        {"window", int64_t{1}}, {"kernel", int64_t{1}}, {"large", 0.0}, {"slack", int64_t{1}}};
    options.shape = {.num_layers = 1, .num_heads = 1, .num_kv_heads = 1};
    options.budget = 3;
    options.seed = seed;
    FakeWorld world;
    world.key = [&](int64_t, int64_t, int64_t token) {
      return std::vector<float>{token < 4 ? std::log(static_cast<float>(share[token])) : 0};
    };
    world.value = world.query = [](int64_t, int64_t, int64_t) { return std::vector<float>{1}; };
    FakeSequence sequence(options, world);
    while (sequence.newest() < 4) {
      sequence.Decode();
      sequence.Round();
    }
    drawn[sequence.Kept()] += 1.0 / kRuns;
  }
  for (int32_t a = 0; a < 4; ++a) {
    for (int32_t b = a + 1; b < 4; ++b) {
      const double expected =
          share[a] * share[b] / (1 - share[a]) + share[b] * share[a] / (1 - share[b]);
      const double got = drawn[{a, b, 4}];  // the newest is the window
      EXPECT_NEAR(got, expected, Tolerance(expected)) << "tokens " << a << " and " << b;
    }
  }
}

}  // namespace random_policy_test
}  // namespace epikv
