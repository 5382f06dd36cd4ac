#include "runtime/sampling/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace epikv {
namespace sampler_test {

using Logits = std::vector<float>;
using testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

Draw At(uint64_t index) { return {.index = index}; }

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
    const auto token = Sample(logits, params, At(i));
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
    EXPECT_LE(*Sample(logits, {.temperature = 1.0f, .top_k = 2}, At(i)), 2);
    EXPECT_LE(*Sample(logits, {.temperature = 0.01f, .top_p = 0.5f}, At(i)), 2);
  }
}

TEST(SamplerTest, NucleusIsTheSmallestSetWithTheMass) {
  // Shares 0.5, 0.25, 0.125, 0.125.
  const Logits logits = {std::log(0.25f), std::log(0.5f), std::log(0.125f), std::log(0.125f)};
  const auto support = [&](float top_p) {
    std::map<int32_t, int> seen;
    for (int i = 0; i < 500; ++i)
      ++seen[*Sample(logits, {.temperature = 1.0f, .top_p = top_p}, At(i))];
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
    EXPECT_EQ(*Sample(logits, {}, At(seed)), greedy);
    EXPECT_EQ(*Sample(logits, {.temperature = 0.0f, .top_p = 0.5f}, At(seed)), greedy);
    EXPECT_EQ(*Sample(logits, {.temperature = 5.0f, .top_k = 1}, At(seed)), greedy);
    EXPECT_EQ(*Sample(logits, {.temperature = 1.0f, .top_p = 1e-6f}, At(seed)), greedy);
  }
}

TEST(SamplerTest, TemperatureTowardsZeroIsGreedy) {
  Logits logits = RandomLogits(1000, 1);
  logits[437] = 20;  // no tie
  for (float temperature : {1e-2f, 1e-10f, 1e-38f, 1e-44f}) {
    for (int i = 0; i < 50; ++i)
      EXPECT_EQ(*Sample(logits, {.temperature = temperature}, At(i)), 437);
  }
}

TEST(SamplerTest, ADrawDependsOnSeedAndIndexAlone) {
  const Logits logits = RandomLogits(500, 2);
  const auto draw = [&](uint64_t seed, uint64_t index) {
    return *Sample(logits, {.temperature = 3.0f, .seed = seed}, At(index));
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
    tokens.push_back(*Sample(logits, {.temperature = 1.0f, .top_p = 0.9f, .seed = 42}, At(i)));
  }
  EXPECT_EQ(tokens, std::vector<int32_t>({60, 90, 19, 46, 19, 30, 90, 19}));
}

TEST(SamplerTest, ImpossibleTokensAreNeverDrawn) {
  const Logits logits = {-kInfinity, 0, -kInfinity, 1, -kInfinity};
  for (int i = 0; i < 500; ++i) {
    for (const SamplingParams& params :
         {SamplingParams{.temperature = 100.0f}, SamplingParams{.temperature = 1.0f, .top_k = 4},
          SamplingParams{.temperature = 1.0f, .top_p = 0.999f}}) {
      EXPECT_EQ(*Sample(logits, params, At(i)) % 2, 1);
    }
  }
  EXPECT_EQ(LogprobsOf(logits, 0)->of_token, -kInfinity);
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
             {Argmax(logits).status(), Sample(logits, {.temperature = 1.0f}, At(0)).status(),
              Sample(logits, {.temperature = 1.0f, .top_k = 2}, At(0)).status(),
              LogprobsOf(logits, 0).status()}) {
          EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
          EXPECT_EQ(status.message(), expected);
        }
      }
    }
  }
  EXPECT_EQ(Argmax(Logits(20, -kInfinity)).status().code(), absl::StatusCode::kInternal);
}

// What a device found says what the row itself would.
TEST(SamplerTest, BrokenLogitsThatADeviceFoundAreNamed) {
  EXPECT_EQ(*CheckedArgmax(1.5f, 7), 7);
  for (const float broken : {kNaN, kInfinity, -kInfinity}) {
    Logits logits(20, -kInfinity);
    logits[7] = broken;
    EXPECT_EQ(CheckedArgmax(broken, 7).status(), Argmax(logits).status());
  }
}

TEST(SamplerTest, WhatItNeedsOfARow) {
  const std::vector<int32_t> masked = {3};
  const std::vector<uint32_t> allowed = {1};
  EXPECT_EQ(RowNeedOf({}, {}), RowNeed::kHighest);
  EXPECT_EQ(RowNeedOf({.temperature = 0.0f, .top_p = 0.5f}, {}), RowNeed::kHighest);
  EXPECT_EQ(RowNeedOf({.temperature = 0.1f}, {}), RowNeed::kDrawn);
  EXPECT_EQ(RowNeedOf({.temperature = 0.1f, .top_p = 1.0f, .top_k = 0}, {}), RowNeed::kDrawn);
  EXPECT_EQ(RowNeedOf({.temperature = 0.1f, .top_p = 0.5f}, {}), RowNeed::kHead);
  EXPECT_EQ(RowNeedOf({.temperature = 0.1f, .top_k = 9}, {}), RowNeed::kHead);
  EXPECT_EQ(RowNeedOf({.temperature = 0.1f, .min_p = 0.1f}, {}), RowNeed::kHead);
  EXPECT_EQ(RowNeedOf({.temperature = 0.1f, .top_k = 9, .typical_p = 0.5f}, {}), RowNeed::kHead);
  EXPECT_EQ(RowNeedOf({.temperature = 0.1f, .typical_p = 0.5f}, {}), RowNeed::kRow);
  EXPECT_EQ(RowNeedOf({.temperature = 0.1f, .min_p = 0.1f, .typical_p = 0.5f}, {}), RowNeed::kRow);
  for (const float temperature : {0.0f, 0.1f}) {
    EXPECT_EQ(RowNeedOf({.temperature = temperature, .repetition_penalty = 1.1f}, {}),
              RowNeed::kRow);
    EXPECT_EQ(RowNeedOf({.temperature = temperature, .logit_bias = {{1, 2.0f}}}, {}),
              RowNeed::kRow);
    EXPECT_EQ(RowNeedOf({.temperature = temperature}, {.masked = masked}), RowNeed::kRow);
    EXPECT_EQ(RowNeedOf({.temperature = temperature}, {.allowed = allowed}), RowNeed::kRow);
  }
}

// The likeliest `count` tokens of a row, those that tie in any order.
LogitsHead HeadOf(const Logits& logits, size_t count, float temperature, std::mt19937& random) {
  LogitsHead head = {.whole = count >= logits.size()};
  for (size_t token = 0; token < logits.size(); ++token) {
    head.likeliest.push_back({static_cast<int32_t>(token), logits[token]});
  }
  std::shuffle(head.likeliest.begin(), head.likeliest.end(), random);
  std::stable_sort(head.likeliest.begin(), head.likeliest.end(),
                   [](const Candidate& a, const Candidate& b) { return a.weight > b.weight; });
  for (const Candidate& c : head.likeliest) {
    head.total += std::exp((c.weight - head.likeliest.front().weight) / temperature);
  }
  head.likeliest.resize(std::min(count, logits.size()));
  return head;
}

// Whatever of a row a device brings: the token that the whole row gives, or none.
TEST(SamplerTest, AHeadTellsTheTokenOrSaysThatItCannot) {
  std::mt19937 random(5);
  std::map<bool, int> told;  // by whether it did
  for (uint32_t seed = 0; seed < 3000; ++seed) {
    const Logits logits = RandomLogits(seed % 3 == 0 ? 30 : 400, seed);
    SamplingParams params = {.temperature = seed % 2 ? 0.3f : 1.5f, .seed = seed};
    if (seed % 5 < 2) params.top_k = 1 + random() % 60;
    if (seed % 7 < 4) params.top_p = 0.3f + 0.1f * static_cast<float>(random() % 7);
    if (seed % 4 == 0) params.min_p = 0.02f * static_cast<float>(1 + random() % 10);
    if (RowNeedOf(params, At(0)) != RowNeed::kHead) continue;
    if (seed % 11 == 0) params.typical_p = 0.7f;
    if (RowNeedOf(params, At(0)) != RowNeed::kHead) continue;
    for (const size_t count : {1, 8, 30, 50, 399, 400}) {
      const std::optional<int32_t> token =
          DrawFromHead(HeadOf(logits, count, *params.temperature, random), params, seed);
      ++told[token.has_value()];
      ASSERT_TRUE(token.has_value() || count < logits.size()) << seed;
      if (token.has_value()) {
        ASSERT_EQ(*token, *Sample(logits, params, At(seed))) << seed << " of " << count;
      }
    }
  }
  EXPECT_GT(told[true], 4000);
  EXPECT_GT(told[false], 1500);
}

// Logits that differ may weigh alike: then the lower token is first, as in Sample.
TEST(SamplerTest, AHeadOrdersWhatWeighsAlikeByToken) {
  const Logits logits = {1.0f, 1.001f, 0.999f, -1e9f};
  for (uint64_t draw = 0; draw < 40; ++draw) {
    for (const SamplingParams& params :
         {SamplingParams{.temperature = 1e5f, .top_p = 0.9f},
          SamplingParams{.temperature = 1e5f, .top_p = 0.5f, .top_k = 3}}) {
      std::mt19937 random(draw);
      const LogitsHead head = HeadOf(logits, 4, *params.temperature, random);
      EXPECT_EQ(DrawFromHead(head, params, draw), *Sample(logits, params, At(draw)));
    }
  }
}

// A token outside may tie with the last inside, and stand before it.
TEST(SamplerTest, AHeadThatEndsInATieDoesNotTell) {
  const auto draw = [](std::vector<Candidate> likeliest, const SamplingParams& params) {
    return DrawFromHead({.likeliest = std::move(likeliest), .total = 4}, params, 0);
  };
  const SamplingParams two = {.temperature = 1.0f, .top_k = 2};
  EXPECT_EQ(draw({{4, 2}, {3, 1}, {2, 1}}, two), std::nullopt);
  EXPECT_NE(draw({{4, 2}, {3, 1}, {2, 0}}, two), std::nullopt);
  EXPECT_EQ(draw({{4, 2}, {3, 1}}, two), std::nullopt);
  const SamplingParams half = {.temperature = 1.0f, .top_p = 0.5f};
  EXPECT_EQ(draw({{4, 2}, {3, 2}}, half), std::nullopt);
  EXPECT_NE(draw({{4, 2}, {3, 2}, {2, 1}}, half), std::nullopt);
  const SamplingParams least = {.temperature = 1.0f, .min_p = 0.5f};
  EXPECT_EQ(draw({{4, 2}, {3, 1.9f}}, least), std::nullopt);
  EXPECT_NE(draw({{4, 2}, {3, 1}}, least), std::nullopt);
}

TEST(SamplerTest, LogProbIsTheLogSoftmaxOfRawLogits) {
  for (size_t vocab : {1, 2, 100, 50000}) {
    Logits logits = RandomLogits(vocab, 5);
    for (float& logit : logits) logit += 1000;  // exp would overflow
    double sum = 0;
    for (float logit : logits) sum += std::exp(double{logit} - 1000);
    for (int32_t token : {0, static_cast<int32_t>(vocab) - 1}) {
      const double expected = double{logits[token]} - 1000 - std::log(sum);
      EXPECT_NEAR(LogprobsOf(logits, token)->of_token, expected, 1e-5);
    }
  }
}

std::optional<float> FloatOf(const nlohmann::json& row, const char* name) {
  return row.contains(name) ? std::optional<float>(row[name].get<float>()) : std::nullopt;
}

// golden/make_sampling.py leaves no two tokens nearer than 1e-5 at any cut.
TEST(SamplerTest, CandidatesAreThoseOfTransformers) {
  std::ifstream file(EPIKV_SOURCE_DIR "/tests/golden/sampling.json");
  const nlohmann::json golden = nlohmann::json::parse(file);
  ASSERT_GE(golden["rows"].size(), 200u);
  for (size_t i = 0; i < golden["rows"].size(); ++i) {
    const nlohmann::json& row = golden["rows"][i];
    SCOPED_TRACE(testing::Message() << "row " << i);
    SamplingParams params{.temperature = FloatOf(row, "temperature"),
                          .top_p = FloatOf(row, "top_p"),
                          .min_p = FloatOf(row, "min_p"),
                          .typical_p = FloatOf(row, "typical_p"),
                          .repetition_penalty = FloatOf(row, "repetition_penalty"),
                          .frequency_penalty = FloatOf(row, "frequency_penalty"),
                          .presence_penalty = FloatOf(row, "presence_penalty")};
    if (row.contains("top_k")) params.top_k = row["top_k"].get<int32_t>();
    if (row.contains("logit_bias")) {
      for (const auto& [token, bias] : row["logit_bias"].items()) {
        params.logit_bias[std::stoi(token)] = bias.get<float>();
      }
    }
    const std::vector<int32_t> prompt = row["prompt"], outputs = row["outputs"];
    const std::vector<int32_t> masked = row.value("masked", std::vector<int32_t>());
    const Draw draw{.prompt = prompt, .outputs = outputs, .masked = masked};
    const Logits logits = row["logits"];
    const auto candidates = Candidates(logits, params, draw);
    ASSERT_TRUE(candidates.ok()) << candidates.status();

    double total = 0;
    std::map<int32_t, double> probabilities;
    for (const Candidate& c : *candidates) {
      if (!(c.weight > 0)) continue;
      EXPECT_TRUE(probabilities.emplace(c.token, c.weight).second) << "twice: " << c.token;
      total += c.weight;
    }
    std::vector<int32_t> tokens;
    for (auto& [token, p] : probabilities) {
      tokens.push_back(token);
      p /= total;
    }
    ASSERT_EQ(tokens, row["tokens"].get<std::vector<int32_t>>());
    for (size_t t = 0; t < tokens.size(); ++t) {
      EXPECT_NEAR(probabilities[tokens[t]], row["probabilities"][t].get<double>(), 2e-6);
    }
    params.temperature = 0;  // the likeliest after penalties, whatever is cut
    const auto greedy = Candidates(logits, params, draw);
    ASSERT_EQ(greedy->size(), 1u);
    if (!params.typical_p.has_value()) {
      const auto likelier = [](const auto& a, const auto& b) { return a.second < b.second; };
      EXPECT_EQ(greedy->front().token,
                std::max_element(probabilities.begin(), probabilities.end(), likelier)->first);
    }
  }
}

std::set<int32_t> Support(const Logits& logits, const SamplingParams& params,
                          const Draw& draw = {}) {
  std::set<int32_t> support;
  const std::vector<Candidate> candidates = *Candidates(logits, params, draw);
  for (const Candidate& c : candidates) support.insert(c.token);
  return support;
}

TEST(SamplerTest, MinPIsAShareOfTheLikeliest) {
  // Shares 0.5, 0.25, 0.125, 0.125.
  const Logits logits = {std::log(0.25f), std::log(0.5f), std::log(0.125f), std::log(0.125f)};
  const auto support = [&](float min_p) {
    return Support(logits, {.temperature = 1.0f, .min_p = min_p});
  };
  EXPECT_THAT(support(0.2f), testing::ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(support(0.3f), testing::ElementsAre(0, 1));
  EXPECT_THAT(support(0.6f), testing::ElementsAre(1));
  EXPECT_THAT(support(1.0f), testing::ElementsAre(1));
}

TEST(SamplerTest, TypicalMayDropTheLikeliest) {
  // One token of share 0.4 and 60 of 0.01: the entropy, 3.13, is nearer to those.
  Logits logits(61, std::log(0.01f));
  logits[7] = std::log(0.4f);
  const std::set<int32_t> support = Support(logits, {.temperature = 1.0f, .typical_p = 0.245f});
  EXPECT_FALSE(support.contains(7));
  EXPECT_EQ(support.size(), 25u);
  EXPECT_EQ(*support.begin(), 0);  // of tokens as typical as each other the lower stays
}

TEST(SamplerTest, GreedyIsSubjectToBiasMaskAndPenalties) {
  const Logits logits = {1, 5, 4, 3};
  const std::vector<int32_t> one = {1}, two_and_one = {2, 1, 1}, mask = {1, 2};
  EXPECT_EQ(*Sample(logits, {}, {}), 1);
  EXPECT_EQ(*Sample(logits, {.logit_bias = {{0, 6.0f}}}, {}), 0);
  EXPECT_EQ(*Sample(logits, {}, {.masked = mask}), 3);
  EXPECT_EQ(*Sample(logits, {.repetition_penalty = 2.0f}, {.prompt = one}), 2);
  EXPECT_EQ(*Sample(logits, {.presence_penalty = 1.5f}, {.outputs = one}), 2);
  EXPECT_EQ(*Sample(logits, {.presence_penalty = 1.5f}, {.prompt = one}), 1) << "prompts count not";
  EXPECT_EQ(*Sample(logits, {.frequency_penalty = 1.4f}, {.outputs = two_and_one}), 3);
}

TEST(SamplerTest, AMaskOfEverythingPossibleGivesWay) {
  const Logits logits = {-kInfinity, 1, 2, -kInfinity};
  const std::vector<int32_t> mask = {1, 2};
  EXPECT_EQ(*Sample(logits, {}, {.masked = mask}), 2);
  EXPECT_THAT(Support({0, 0, 0}, {.temperature = 1.0f}, {.masked = std::vector<int32_t>{0, 1, 2}}),
              testing::ElementsAre(0, 1, 2));
  // Bias and penalties stay.
  EXPECT_EQ(*Sample(logits, {.logit_bias = {{1, 5.0f}}}, {.masked = mask}), 1);
}

TEST(SamplerTest, TheStrongestSettingsLeaveSomethingToDraw) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    Logits logits = RandomLogits(30, seed);
    for (float& logit : logits) logit *= 1000;
    std::vector<int32_t> all(30);
    std::iota(all.begin(), all.end(), 0);
    SamplingParams params{.temperature = 1e-30f,
                          .top_p = 1e-6f,
                          .top_k = 1,
                          .min_p = 1.0f,
                          .typical_p = 1e-6f,
                          .repetition_penalty = seed % 2 == 0 ? 100.0f : 0.01f,
                          .frequency_penalty = 2.0f,
                          .presence_penalty = 2.0f};
    for (int32_t token : all) params.logit_bias[token] = -100;
    const auto token = Sample(logits, params, {.prompt = all, .outputs = all, .masked = all});
    EXPECT_TRUE(token.ok()) << token.status();
  }
}

TEST(SamplerTest, MaskedTokensMayNotHideABrokenForward) {
  const std::vector<int32_t> mask = {1};
  for (float temperature : {0.0f, 1.0f}) {
    const auto token = Sample({0, kNaN, 1}, {.temperature = temperature}, {.masked = mask});
    EXPECT_EQ(token.status(), absl::InternalError("logits of token 1 are NaN"));
  }
}

TEST(SamplerTest, TopLogProbsAreTheLikeliestOfRawLogits) {
  for (size_t vocab : {1, 2, 5, 300}) {
    const Logits logits = RandomLogits(vocab, 9);
    for (int64_t k : {1, 5, 20}) {
      const Logprobs logprobs = *LogprobsOf(logits, 0, k);
      EXPECT_EQ(logprobs.of_token, LogprobsOf(logits, 0)->of_token);
      ASSERT_EQ(logprobs.top.size(), std::min<size_t>(k, vocab));
      std::vector<int32_t> order(vocab);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(),
                       [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
      for (size_t i = 0; i < logprobs.top.size(); ++i) {
        EXPECT_EQ(logprobs.top[i].token, order[i]);
        EXPECT_EQ(logprobs.top[i].logprob, LogprobsOf(logits, order[i])->of_token);
      }
    }
  }
  EXPECT_TRUE(LogprobsOf(Logits{1, 2}, 0)->top.empty());
}

// Also where a bias, a penalty or the mask of ends speaks for a token that is not.
TEST(SamplerTest, DrawsOnlyWhatIsAllowed) {
  const std::vector<uint32_t> allowed = {1u << 3 | 1u << 9, 1u << 1};  // 3, 9 and 33
  const std::vector<int32_t> masked = {9};
  const Logits logits = RandomLogits(40, 5);
  SamplingParams params{.temperature = 2.0f, .presence_penalty = -2.0f, .logit_bias = {{4, 100}}};
  const std::vector<int32_t> outputs = {4, 5};
  std::map<int32_t, int> counts;
  for (uint64_t i = 0; i < 2000; ++i) {
    const auto token = Sample(logits, params, {.index = i, .outputs = outputs, .allowed = allowed});
    ASSERT_TRUE(token.ok()) << token.status();
    ++counts[*token];
  }
  EXPECT_EQ(counts.size(), 3);
  EXPECT_TRUE(counts.contains(3) && counts.contains(9) && counts.contains(33));
  const SamplingParams greedy;
  const auto best = Sample(logits, greedy, {.allowed = allowed});
  for (const int32_t token : {3, 9, 33}) EXPECT_LE(logits[token], logits[*best]);
  const auto unmasked = Sample(logits, greedy, {.masked = masked, .allowed = allowed});
  EXPECT_TRUE(*unmasked == 3 || *unmasked == 33);
  // The mask of ends gives way where nothing else is allowed; what is allowed does not.
  const std::vector<uint32_t> only = {1u << 9, 0};
  EXPECT_EQ(*Sample(logits, greedy, {.masked = masked, .allowed = only}), 9);
  Logits impossible = logits;
  impossible[9] = -kInfinity;
  const auto none = Sample(impossible, greedy, {.allowed = only});
  EXPECT_EQ(none.status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace sampler_test
}  // namespace epikv
