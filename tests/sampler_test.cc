#include "runtime/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace epikv {
namespace {

using Logits = std::vector<float>;
using testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Normally distributed, rounded so that some tie.
Logits RandomLogits(size_t vocab, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 2);
  Logits logits(vocab);
  for (float& logit : logits) logit = std::round(normal(random) * 8) / 8;
  return logits;
}

// Probabilities that Sample promises, by sorting the whole vocabulary.
std::vector<double> ExactDistribution(const Logits& logits, const SamplingParams& params) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  const size_t top_k = params.top_k.value_or(0);
  if (top_k > 0 && top_k < order.size()) order.resize(top_k);
  std::vector<double> p(logits.size());
  double total = 0;
  for (int32_t t : order) {
    p[t] = std::exp((double{logits[t]} - logits[order[0]]) / *params.temperature);
    total += p[t];
  }
  double mass = 0, kept = 0;
  for (int32_t t : order) {
    const bool inside = mass < params.top_p.value_or(1) * total;
    mass += p[t];
    if (!inside) p[t] = 0;
    kept += p[t];
  }
  for (double& x : p) x /= kept;
  return p;
}

// Draws agree with the exact distribution: none outside its support, and a chi-square statistic
// (tokens expected fewer than five times taken together) below its 99.9th percentile, by Wilson and
// Hilferty's approximation.
void ExpectDrawsMatch(const Logits& logits, const SamplingParams& params) {
  constexpr int kDraws = 4000;
  const std::vector<double> p = ExactDistribution(logits, params);
  std::vector<int> counts(logits.size());
  for (int i = 0; i < kDraws; ++i) {
    const auto token = Sample(logits, params, i);
    ASSERT_TRUE(token.ok()) << token.status();
    ++counts[*token];
  }
  double chi_square = 0, rare_expected = 0;
  int rare_count = 0, cells = 0;
  for (size_t t = 0; t < logits.size(); ++t) {
    if (p[t] == 0) {
      EXPECT_EQ(counts[t], 0) << "token " << t;
    } else if (p[t] * kDraws < 5) {
      rare_expected += p[t] * kDraws;
      rare_count += counts[t];
    } else {
      chi_square += std::pow(counts[t] - p[t] * kDraws, 2) / (p[t] * kDraws);
      ++cells;
    }
  }
  if (rare_expected >= 5) {
    chi_square += std::pow(rare_count - rare_expected, 2) / rare_expected;
    ++cells;
  }
  const double freedom = std::max(1, cells - 1);
  const double scale = 2 / (9 * freedom);
  EXPECT_LT(chi_square, freedom * std::pow(1 - scale + 3.09 * std::sqrt(scale), 3));
}

TEST(SamplerTest, DrawsFollowTheExactDistribution) {
  const std::vector<SamplingParams> all = {
      {.temperature = 1.0f, .seed = 1},
      {.temperature = 0.5f, .seed = 2},
      {.temperature = 3.0f, .seed = 3},
      {.temperature = 1.0f, .top_k = 1, .seed = 4},
      {.temperature = 1.0f, .top_k = 5, .seed = 5},
      {.temperature = 1.0f, .top_k = 100000, .seed = 6},
      {.temperature = 1.0f, .top_p = 0.1f, .seed = 7},
      {.temperature = 1.0f, .top_p = 0.5f, .seed = 8},
      {.temperature = 2.0f, .top_p = 0.95f, .seed = 9},
      {.temperature = 1.0f, .top_p = 1.0f, .top_k = 0, .seed = 10},
      {.temperature = 1.5f, .top_p = 0.7f, .top_k = 20, .seed = 11},
  };
  for (const SamplingParams& params : all) {
    for (size_t vocab : {1, 2, 7, 16, 33, 700}) {
      SCOPED_TRACE(testing::Message() << "seed " << params.seed << ", vocab " << vocab);
      ExpectDrawsMatch(RandomLogits(vocab, static_cast<uint32_t>(vocab)), params);
    }
  }
}

TEST(SamplerTest, LowerTokenWinsATieAtTheCut) {
  const Logits logits = {0, 1, 1, 1, 0, 1};
  for (int i = 0; i < 200; ++i) {
    EXPECT_LE(*Sample(logits, {.temperature = 1.0f, .top_k = 2}, i), 2);
    EXPECT_LE(*Sample(logits, {.temperature = 0.01f, .top_p = 0.5f}, i), 2);
  }
}

TEST(SamplerTest, NucleusIsTheSmallestSetWithTheMass) {
  // Shares 0.5, 0.25, 0.125, 0.125.
  const Logits logits = {std::log(0.25f), std::log(0.5f), std::log(0.125f), std::log(0.125f)};
  const auto support = [&](float top_p) {
    std::map<int32_t, int> seen;
    for (int i = 0; i < 500; ++i) ++seen[*Sample(logits, {.temperature = 1.0f, .top_p = top_p}, i)];
    return seen.size();
  };
  EXPECT_EQ(support(0.4f), 1);
  EXPECT_EQ(support(0.6f), 2);
  EXPECT_EQ(support(0.8f), 3);
  EXPECT_EQ(support(0.9f), 4);
}

TEST(SamplerTest, NarrowSettingsAreGreedy) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    const Logits logits = RandomLogits(1 + seed * 7, seed);
    const int32_t greedy = *Argmax(logits);
    EXPECT_EQ(greedy, std::max_element(logits.begin(), logits.end()) - logits.begin());
    EXPECT_EQ(*Sample(logits, {}, seed), greedy);
    EXPECT_EQ(*Sample(logits, {.temperature = 0.0f, .top_p = 0.5f}, seed), greedy);
    EXPECT_EQ(*Sample(logits, {.temperature = 5.0f, .top_k = 1}, seed), greedy);
    EXPECT_EQ(*Sample(logits, {.temperature = 1.0f, .top_p = 1e-6f}, seed), greedy);
  }
}

TEST(SamplerTest, TemperatureTowardsZeroIsGreedy) {
  Logits logits = RandomLogits(1000, 1);
  logits[437] = 20;  // no tie
  for (float temperature : {1e-2f, 1e-10f, 1e-38f, 1e-44f}) {
    for (int i = 0; i < 50; ++i) EXPECT_EQ(*Sample(logits, {.temperature = temperature}, i), 437);
  }
}

TEST(SamplerTest, ADrawDependsOnSeedAndIndexAlone) {
  const Logits logits = RandomLogits(500, 2);
  const auto draw = [&](uint64_t seed, uint64_t index) {
    return *Sample(logits, {.temperature = 3.0f, .seed = seed}, index);
  };
  std::vector<int32_t> forward, backward, other_seed;
  for (int i = 0; i < 100; ++i) {
    forward.push_back(draw(7, i));
    backward.push_back(draw(7, 99 - i));
    other_seed.push_back(draw(8, i));
  }
  std::reverse(backward.begin(), backward.end());
  EXPECT_EQ(forward, backward);
  EXPECT_NE(forward, other_seed);
}

// What a seed gives is a promise to clients: these numbers change only with a major version.
TEST(SamplerTest, ASeedsTokensStayAsTheyAre) {
  Logits logits(100);
  for (int i = 0; i < 100; ++i) logits[i] = static_cast<float>(i * 37 % 101) / 8;
  std::vector<int32_t> tokens;
  for (int i = 0; i < 8; ++i) {
    tokens.push_back(*Sample(logits, {.temperature = 1.0f, .top_p = 0.9f, .seed = 42}, i));
  }
  EXPECT_EQ(tokens, std::vector<int32_t>({60, 90, 19, 46, 19, 30, 90, 19}));
}

TEST(SamplerTest, ImpossibleTokensAreNeverDrawn) {
  const Logits logits = {-kInfinity, 0, -kInfinity, 1, -kInfinity};
  for (int i = 0; i < 500; ++i) {
    for (const SamplingParams& params :
         {SamplingParams{.temperature = 100.0f}, SamplingParams{.temperature = 1.0f, .top_k = 4},
          SamplingParams{.temperature = 1.0f, .top_p = 0.999f}}) {
      EXPECT_EQ(*Sample(logits, params, i) % 2, 1);
    }
  }
  EXPECT_EQ(*LogProb(logits, 0), -kInfinity);
}

TEST(SamplerTest, BrokenLogitsAreNamed) {
  for (size_t vocab : {3, 50}) {
    for (size_t at : {size_t{1}, vocab - 1}) {
      for (float broken : {kNaN, kInfinity}) {
        Logits logits(vocab, 0.5f);
        logits[at] = broken;
        const std::string expected =
            "logits of token " + std::to_string(at) + (broken > 0 ? " are infinite" : " are NaN");
        for (const absl::Status& status :
             {Argmax(logits).status(), Sample(logits, {.temperature = 1.0f}, 0).status(),
              Sample(logits, {.temperature = 1.0f, .top_k = 2}, 0).status(),
              LogProb(logits, 0).status()}) {
          EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
          EXPECT_EQ(status.message(), expected);
        }
      }
    }
  }
  EXPECT_EQ(Argmax(Logits(20, -kInfinity)).status().code(), absl::StatusCode::kInternal);
}

TEST(SamplerTest, LogProbIsTheLogSoftmaxOfRawLogits) {
  for (size_t vocab : {1, 2, 100, 50000}) {
    Logits logits = RandomLogits(vocab, 5);
    for (float& logit : logits) logit += 1000;  // exp would overflow
    double sum = 0;
    for (float logit : logits) sum += std::exp(double{logit} - 1000);
    for (int32_t token : {0, static_cast<int32_t>(vocab) - 1}) {
      const double expected = double{logits[token]} - 1000 - std::log(sum);
      EXPECT_NEAR(*LogProb(logits, token), expected, 1e-5);
    }
  }
}

}  // namespace
}  // namespace epikv
