#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "policies/registry.h"
#include "tests/fixtures/fake_sequence.h"

// epikv_probe is ours: its score against the definition, and what its draws make of it.

namespace epikv {
namespace epikv_probe_test {

using testing::HasSubstr;

const PolicySpec& Probe() { return *FindPolicy(AllPolicies(), "epikv_probe"); }

ModelShape WithProbe(ModelShape shape, const std::string& data) {
  auto read = Probe().read_data({.json = data, .arrays = {}}, shape);
  EXPECT_TRUE(read.ok()) << read.status();
  if (read.ok()) shape.artefacts["epikv_probe"] = *std::move(read);
  return shape;
}

// Of the four channels of FakeSequence's world.
const std::vector<float> kWeights = {0.5f, -2.0f, 1.25f, 0.75f};
constexpr char kData[] = R"({"layer": 1, "weights": [0.5, -2, 1.25, 0.75], "noted": "beside"})";

double Score(const std::vector<float>& residual) {
  double dot = 0, squares = 0;
  for (size_t c = 0; c < residual.size(); ++c) {
    dot += kWeights[c] * residual[c];
    squares += residual[c] * residual[c] / static_cast<double>(residual.size());
  }
  return dot / std::sqrt(squares);
}

FakeSequence::Options Options() {
  FakeSequence::Options options{.spec = &Probe(), .budget = 20, .seed = 3};
  options.shape = WithProbe(options.shape, kData);
  return options;
}

std::vector<int32_t> KeptAfter(const FakeSequence::Options& options, const FakeWorld& world,
                               int64_t tokens) {
  FakeSequence sequence(options, world);
  while (sequence.newest() < tokens - 1) {
    sequence.Decode();
    sequence.Round();
  }
  return sequence.Kept();
}

TEST(EpikvProbe, KeepsTheHighestReadOuts) {
  const FakeWorld world = RandomWorld(5, 1 << 20);
  constexpr int32_t kTokens = 200;
  std::vector<int32_t> best(kTokens);
  for (int32_t token = 0; token < kTokens; ++token) best[token] = token;
  std::sort(best.begin(), best.end(), [&](int32_t a, int32_t b) {
    return Score(world.residual(1, a)) > Score(world.residual(1, b));
  });
  best.resize(20);
  std::sort(best.begin(), best.end());
  EXPECT_EQ(KeptAfter(Options(), world, kTokens), best);
}

// The stream grows; only where it points counts, from numbers that are nearly none to huge ones.
TEST(EpikvProbe, ScaleDoesNotCount) {
  const FakeWorld world = RandomWorld(5, 1 << 20);
  FakeWorld scaled = world;
  scaled.residual = [&](int64_t layer, int64_t token) {
    std::vector<float> row = world.residual(layer, token);
    const float scale = token % 3 == 0 ? 1e18f : token % 3 == 1 ? 1.0f : 20.0f;
    for (float& x : row) x *= scale;
    return row;
  };
  EXPECT_EQ(KeptAfter(Options(), scaled, 200), KeptAfter(Options(), world, 200));
}

TEST(EpikvProbe, NothingAtAllIsAScoreLikeAnother) {
  FakeWorld world = RandomWorld(5, 1 << 20);
  world.residual = [](int64_t, int64_t) { return std::vector<float>(4, 0.0f); };
  // All tie, so the newest stay.
  const std::vector<int32_t> kept = KeptAfter(Options(), world, 60);
  EXPECT_EQ(kept.front(), 40);
}

// Of a residual of token 7 that holds `bad`.
void ExpectTokenSevenNamed(const FakeSequence::Options& options, float bad) {
  FakeWorld world = RandomWorld(5, 1 << 20);
  world.residual = [&, good = world.residual](int64_t layer, int64_t token) {
    std::vector<float> row = good(layer, token);
    if (token == 7) row[2] = bad;
    return row;
  };
  FakeSequence sequence(options, world);
  while (!sequence.OverBudget()) sequence.Decode();
  const Eviction eviction = sequence.Ask();
  EXPECT_EQ(eviction.status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(eviction.status.message()), HasSubstr("token 7"));
}

TEST(EpikvProbe, WhatIsNotFiniteIsAnError) {
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), INFINITY}) {
    ExpectTokenSevenNamed(Options(), bad);
  }
}

TEST(EpikvProbe, ReadsTheBlockOfItsArtefact) {
  for (int64_t layer : {0, 2}) {
    const ModelShape shape =
        WithProbe({.num_layers = 3, .hidden_size = 1},
                  "{\"layer\": " + std::to_string(layer) + ", \"weights\": [1]}");
    const PolicyTraits traits = Probe().traits(ResolveParams(Probe(), {}, shape).params, shape);
    EXPECT_THAT(traits.residual_layers, testing::ElementsAre(layer));
  }
}

TEST(EpikvProbe, AnArtefactOfAnotherShapeIsRefused) {
  const ModelShape shape{.num_layers = 3, .hidden_size = 2};
  auto said = [&](const std::string& data) {
    return std::string(Probe().read_data({.json = data, .arrays = {}}, shape).status().message());
  };
  EXPECT_EQ(said(R"({"layer": 2, "weights": [1, -0.5]})"), "");
  EXPECT_THAT(said("[1, 2]"), HasSubstr("must be an object"));
  for (const char* layer : {"3", "-1", "1.5", "\"1\"", "null"}) {
    EXPECT_THAT(said(std::string(R"({"weights": [1, 2], "layer": )") + layer + "}"),
                HasSubstr("layer must be a block of the model, 0 to 2"))
        << layer;
  }
  EXPECT_THAT(said(R"({"weights": [1, 2]})"), HasSubstr("layer must be"));
  for (const char* weights : {"[1]", "[1, 2, 3]", "[1, \"2\"]", "[1, null]", "[1, 1e39]", "7"}) {
    EXPECT_THAT(said(std::string(R"({"layer": 0, "weights": )") + weights + "}"),
                HasSubstr("weights must be finite numbers [2]"))
        << weights;
  }
  EXPECT_THAT(said(R"({"layer": 0})"), HasSubstr("weights must be"));
}

// The same weights at each age, so that only biases tell ages apart.
constexpr char kAgedData[] = R"({"layer": 1, "weights": [0.5, -2, 1.25, 0.75], "by_age": [
    {"age": 4, "weights": [0.5, -2, 1.25, 0.75], "bias": 2},
    {"age": 16, "weights": [0.5, -2, 1.25, 0.75], "bias": 1},
    {"age": 64, "weights": [-0.5, 2, -1.25, -0.75], "bias": -1}]})";

FakeSequence::Options AgedOptions() {
  FakeSequence::Options options{.spec = &Probe(), .budget = 60, .seed = 3};
  options.params = {{"aged", true}};
  options.shape = WithProbe(options.shape, kAgedData);
  return options;
}

double AgedScore(const std::vector<float>& residual, int64_t age) {
  const double said = Score(residual);
  if (age <= 4) return said + 2;
  if (age <= 16) return said + 2 - std::log2(static_cast<double>(age) / 4) / 2;
  if (age >= 64) return -said - 1;
  const double beyond = std::log2(static_cast<double>(age) / 16) / 2;
  return (1 - beyond) * (said + 1) + beyond * (-said - 1);
}

TEST(EpikvProbe, AgedDropsWhatIsWorthLeastAtTheAgeItHas) {
  const FakeWorld world = RandomWorld(5, 1 << 20);
  FakeSequence sequence(AgedOptions(), world);
  std::vector<int32_t> cached;
  int64_t reversed = 0;  // drops of tokens that are older than the last age
  while (sequence.newest() < 300) {
    sequence.Decode();
    const int32_t newest = static_cast<int32_t>(sequence.newest());
    cached.push_back(newest);
    if (sequence.OverBudget()) {
      const auto least = std::min_element(cached.begin(), cached.end(), [&](int32_t a, int32_t b) {
        return AgedScore(world.residual(1, a), newest - a) <
               AgedScore(world.residual(1, b), newest - b);
      });
      reversed += newest - *least >= 64;
      cached.erase(least);
    }
    sequence.Round();
    ASSERT_EQ(sequence.Kept(), cached) << newest;
  }
  EXPECT_GT(reversed, 5);
}

TEST(EpikvProbe, AgedScoresThatAreNotFiniteAreAnError) {
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), INFINITY}) {
    ExpectTokenSevenNamed(AgedOptions(), bad);
  }
}

TEST(EpikvProbe, AgedNeedsAnArtefactThatTellsOfAges) {
  const ModelShape without =
      WithProbe({.num_layers = 3, .hidden_size = 1}, R"({"layer": 1, "weights": [1]})");
  const auto resolved = ResolveParams(Probe(), {{"aged", true}}, without);
  ASSERT_EQ(resolved.violations.size(), 1);
  EXPECT_THAT(resolved.violations[0].description, HasSubstr("says nothing of ages"));
  const ModelShape shape{.num_layers = 3, .hidden_size = 1};
  const auto said = [&](const std::string& by_age) {
    const std::string data = R"({"layer": 1, "weights": [1], "by_age": )" + by_age + "}";
    return std::string(Probe().read_data({.json = data, .arrays = {}}, shape).status().message());
  };
  EXPECT_EQ(said(R"([{"age": 1, "weights": [1], "bias": 0}])"), "");
  EXPECT_EQ(said("[]"), "");
  EXPECT_THAT(said("7"), HasSubstr("by_age must be a list"));
  EXPECT_THAT(said("[7]"), HasSubstr("by_age must be of objects"));
  for (const char* age : {"0", "-4", "1.5", "\"4\"", "null", "1e12", "1048577"}) {
    EXPECT_THAT(said(std::string(R"([{"weights": [1], "bias": 0, "age": )") + age + "}]"),
                HasSubstr("by_age must be of ages that ascend"))
        << age;
  }
  const std::string four = R"({"age": 4, "weights": [1], "bias": 0})";
  EXPECT_THAT(said("[" + four + "," + four + "]"), HasSubstr("ages that ascend"));
  EXPECT_THAT(said(R"([{"age": 4, "weights": [1, 2], "bias": 0}])"),
              HasSubstr("by_age.weights must be finite numbers [1]"));
  EXPECT_THAT(said(R"([{"age": 4, "weights": [1], "bias": 1e39}])"),
              HasSubstr("by_age.bias must be a finite number"));
}

}  // namespace epikv_probe_test
}  // namespace epikv
