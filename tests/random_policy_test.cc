#include <gtest/gtest.h>

#include <cmath>

#include "policies/registry.h"
#include "tests/fake_sequence.h"

namespace epikv {
namespace {

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

}  // namespace
}  // namespace epikv
