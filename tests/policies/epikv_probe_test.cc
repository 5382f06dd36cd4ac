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

TEST(EpikvProbe, WhatIsNotFiniteIsAnError) {
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), INFINITY}) {
    FakeWorld world = RandomWorld(5, 1 << 20);
    world.residual = [&, good = world.residual](int64_t layer, int64_t token) {
      std::vector<float> row = good(layer, token);
      if (token == 7) row[2] = bad;
      return row;
    };
    FakeSequence sequence(Options(), world);
    while (!sequence.OverBudget()) sequence.Decode();
    const Eviction eviction = sequence.Ask();
    EXPECT_EQ(eviction.status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(eviction.status.message()), HasSubstr("token 7"));
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

}  // namespace epikv_probe_test
}  // namespace epikv
