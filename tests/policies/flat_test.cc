#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>

#include "absl/strings/str_cat.h"
#include "policies/epikv/flat_score.h"
#include "policies/random.h"
#include "policies/registry.h"
#include "tests/fixtures/fake_sequence.h"

namespace epikv {
namespace flat_test {

using testing::ElementsAre;

const PolicySpec& Flat() { return *FindPolicy(AllPolicies(), "epikv_flat"); }

ResolvedParams Resolve(const std::map<std::string, ParamValue>& given, const ModelShape& shape) {
  return ResolveParams(Flat(), given, shape);
}

// The definition, without a ring: z of the last of all values among its last `window`.
double StraightforwardZ(const std::vector<float>& values, size_t window) {
  const size_t n = std::min(window, values.size());
  if (n < 2) return 0;
  double mean = 0, variance = 0;
  for (size_t i = values.size() - n; i < values.size(); ++i) mean += values[i] / double(n);
  for (size_t i = values.size() - n; i < values.size(); ++i) {
    variance += (values[i] - mean) * (values[i] - mean) / double(n);
  }
  return (values.back() - mean) / (std::sqrt(variance) + 1e-6);
}

TEST(RollingZ, FirstIsZero) { EXPECT_EQ(RollingZ(64).Push(5), 0); }

TEST(RollingZ, OfTwoIsOneDeviation) {
  RollingZ z(64);
  z.Push(1);
  EXPECT_NEAR(z.Push(3), 1 / (1 + 1e-6), 1e-12);
}

TEST(RollingZ, EqualNumbersGiveExactlyZero) {
  RollingZ z(8);
  for (int i = 0; i < 40; ++i) EXPECT_EQ(z.Push(0.1f), 0);
}

// The window holds the newest, so no z exceeds sqrt(window - 1).
TEST(RollingZ, BoundedBySquareRootOfWindow) {
  RollingZ z(64);
  for (int i = 0; i < 63; ++i) z.Push(0);
  EXPECT_NEAR(z.Push(1000), std::sqrt(63), 1e-4);
}

TEST(RollingZ, EqualsTheDefinition) {
  for (int64_t window : {2, 3, 64, 128}) {
    std::mt19937 random(window);
    std::lognormal_distribution<float> step(1, 1);
    RollingZ z(window);
    std::vector<float> values;
    for (int i = 0; i < 400; ++i) {
      values.push_back(step(random));
      EXPECT_NEAR(z.Push(values.back()), StraightforwardZ(values, window), 1e-9);
    }
  }
}

TEST(RollingZ, ForgetsWhatIsNotANumber) {
  RollingZ z(4);
  z.Push(NAN);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(std::isnan(z.Push(1)));
  EXPECT_EQ(z.Push(1), 0);
}

TEST(FlatScore, IsTheSignedDifference) {
  std::mt19937 random(5);
  std::lognormal_distribution<float> step(1, 1);
  FlatScore score(16, 1), inverted(16, -1);
  RollingZ a(16), b(16);
  for (int i = 0; i < 100; ++i) {
    const float step_a = step(random), step_b = step(random);
    const float expected = static_cast<float>(a.Push(step_a) - b.Push(step_b));
    EXPECT_EQ(score.Push(step_a, step_b), expected);
    EXPECT_EQ(inverted.Push(step_a, step_b), -expected);
  }
}

// The definition: at every round the protected stay, of the others those of the largest values, and
// of the rest the highest scores.
class Mask {
 public:
  Mask(const FakeSequence::Options& options, const FakeWorld& world, int64_t layer_a,
       int64_t layer_b, int64_t window, int64_t sign, size_t reserve)
      : protection_(options.protection),
        budget_(options.budget),
        world_(world),
        layer_a_(layer_a),
        layer_b_(layer_b),
        reserve_(reserve),
        score_(window, sign) {
    for (int64_t token = 0; token < options.prompt_tokens; ++token) Add(-INFINITY);
    if (options.prompt_tokens > budget_) Evict();
  }

  void Decode(int64_t slack) {
    const int64_t token = static_cast<int64_t>(scores_.size());
    Add(score_.Push(world_.residual_step(layer_a_, token), world_.residual_step(layer_b_, token)));
    if (static_cast<int64_t>(kept_.size()) > budget_ + slack) Evict();
  }

  std::vector<int32_t> Kept() const { return {kept_.begin(), kept_.end()}; }

 private:
  void Add(float score) {
    kept_.insert(static_cast<int32_t>(scores_.size()));
    scores_.push_back(score);
  }

  void Evict() {
    const int64_t newest = static_cast<int64_t>(scores_.size()) - 1;
    std::vector<int32_t> open;
    for (int32_t token : kept_) {
      if (!protection_.Covers(token, newest)) open.push_back(token);
    }
    const size_t excess = kept_.size() - budget_;
    Spare(open, std::min(reserve_, open.size() - excess));
    // Ascending scores; the older of equals first.
    std::stable_sort(open.begin(), open.end(),
                     [&](int32_t x, int32_t y) { return scores_[x] < scores_[y]; });
    for (size_t i = 0; static_cast<int64_t>(kept_.size()) > budget_; ++i) kept_.erase(open.at(i));
  }

  // Takes the `count` largest values out of `open`, of equals the newer; of the prompt none.
  void Spare(std::vector<int32_t>& open, size_t count) {
    auto value = [&](int32_t token) {
      return scores_[token] == -INFINITY ? -1 : world_.value(0, 0, token)[0];
    };
    std::stable_sort(open.begin(), open.end(),
                     [&](int32_t x, int32_t y) { return value(x) < value(y); });
    for (; count > 0 && !open.empty() && value(open.back()) >= 0; --count) open.pop_back();
    std::sort(open.begin(), open.end());
  }

  const Protection protection_;
  const int64_t budget_;
  const FakeWorld& world_;
  const int64_t layer_a_, layer_b_;
  const size_t reserve_;
  FlatScore score_;
  std::vector<float> scores_;  // by index
  std::set<int32_t> kept_;
};

TEST(Flat, HeapEqualsTheMask) {
  int64_t evicted = 0, nothing_recent = 0, no_room = 0, prompt_over = 0, reserve_over = 0;
  for (uint64_t seed = 0; seed < 10000; ++seed) {
    std::mt19937 random(seed);
    auto draw = [&](int64_t from, int64_t to) {
      return from + static_cast<int64_t>(random() % (to - from + 1));
    };
    const int64_t prompt = draw(0, 16);
    Protection protection{.prompt = draw(0, 2) == 0 ? draw(0, prompt) : prompt,
                          .sinks = draw(0, 6),
                          .recent = draw(0, 3) == 0 ? 0 : draw(1, 16)};
    for (int64_t spans = draw(0, 2); spans > 0; --spans) {
      const int64_t begin = draw(0, 40);
      protection.spans.push_back({begin, begin + draw(0, 6)});
    }
    const int64_t slack = draw(0, 2) == 0 ? draw(1, 12) : 0;
    const int64_t window = draw(0, 1) == 0 ? 2 : draw(3, 64);
    const int64_t sign = draw(0, 1) == 0 ? 1 : -1;
    const bool a_first = draw(0, 1) == 0;
    FakeSequence::Options options;
    options.spec = &Flat();
    const int64_t reserve = draw(0, 3) == 0 ? draw(1, 30) : 0;
    options.params = {{"reserve", reserve},
                      {"layer_a", int64_t{a_first ? 0 : 2}},
                      {"layer_b", int64_t{a_first ? 2 : 0}},
                      {"window", window},
                      {"sign", sign},
                      {"slack", slack}};
    options.protection = protection;
    options.prompt_tokens = prompt;
    // Down to where the protected alone fill it, and below the prompt where that is not protected.
    const int64_t room = draw(0, 2) == 0 ? draw(0, 2) : draw(3, 30);
    options.budget = std::max<int64_t>(1, protection.Size() + room);
    nothing_recent += protection.recent == 0 ? 1 : 0;
    no_room += room == 0 ? 1 : 0;
    prompt_over += prompt > options.budget ? 1 : 0;
    reserve_over += reserve > room ? 1 : 0;
    // Two levels and a window of two: nearly all scores are equal to many others.
    FakeWorld world = RandomWorld(seed, draw(0, 1) == 0 ? 2 : 1 << 20);
    world.value = [=](int64_t, int64_t, int64_t token) {  // of a range from 0 to 7
      return std::vector<float>{static_cast<float>(CounterRng(seed, 9).Below(8, token)), 0};
    };
    FakeSequence heap(options, world);
    heap.Prefill(prompt);
    heap.Round();
    Mask mask(options, world, a_first ? 0 : 2, a_first ? 2 : 0, window, sign, reserve);
    ASSERT_EQ(heap.Kept(), mask.Kept()) << "seed " << seed << ", prompt";
    for (int64_t i = draw(10, 60); i > 0; --i) {
      heap.Decode();
      evicted += heap.Round().size();
      mask.Decode(slack);
      ASSERT_EQ(heap.Kept(), mask.Kept()) << "seed " << seed << ", token " << heap.newest();
    }
  }
  EXPECT_GT(evicted, 100000);
  EXPECT_GT(nothing_recent, 2000);
  EXPECT_GT(no_room, 1000);
  EXPECT_GT(prompt_over, 100);
  EXPECT_GT(reserve_over, 500);
}

TEST(Flat, UnprotectedPromptGoesFirst) {
  FakeSequence::Options options{
      .spec = &Flat(), .protection = {.prompt = 1, .recent = 2}, .prompt_tokens = 4, .budget = 8};
  FakeSequence sequence(options, RandomWorld(1, 100));
  sequence.Prefill(4);
  for (int i = 0; i < 7; ++i) {
    sequence.Decode();
    sequence.Round();
  }
  EXPECT_THAT(sequence.Kept(), ElementsAre(0, 4, 5, 6, 7, 8, 9, 10));
}

TEST(Flat, ReserveOfNanIsAnError) {
  FakeSequence::Options options{.spec = &Flat(),
                                .params = {{"reserve", int64_t{2}}},
                                .protection = {.recent = 2},
                                .budget = 8};
  FakeWorld world = RandomWorld(1, 100);
  world.value = [](int64_t layer, int64_t, int64_t token) {
    return std::vector<float>{layer == 1 && token == 3 ? NAN : 1, 0};
  };
  FakeSequence sequence(options, world);
  for (int i = 0; i < 9; ++i) sequence.Decode();
  EXPECT_EQ(sequence.Ask().status.code(), absl::StatusCode::kInternal);
}

const ModelShape kEightLayers{.num_layers = 8,
                              .calibrated = {{"epikv_flat",
                                              {{"layer_a", int64_t{5}},
                                               {"layer_b", int64_t{0}},
                                               {"sign", int64_t{-1}},
                                               {"window", int64_t{32}}}}}};

bool Uncalibrated(const std::map<std::string, ParamValue>& given, const ModelShape& shape) {
  return Flat().traits(Resolve(given, shape).params, shape).uncalibrated;
}

TEST(FlatParams, CalibrationIsTheDefault) {
  const Params params = Resolve({}, kEightLayers).params;
  EXPECT_EQ(params.Int("layer_a"), 5);
  EXPECT_EQ(params.Int("layer_b"), 0);
  EXPECT_EQ(params.Int("sign"), -1);
  EXPECT_EQ(params.Int("window"), 32);
  EXPECT_FALSE(Uncalibrated({}, kEightLayers));
}

TEST(FlatParams, NamingALayerLeavesTheCalibration) {
  const Params params = Resolve({{"layer_a", int64_t{1}}}, kEightLayers).params;
  EXPECT_EQ(params.Int("layer_a"), 1);
  EXPECT_EQ(params.Int("layer_b"), 5);
  EXPECT_EQ(params.Int("sign"), 1);
  EXPECT_EQ(params.Int("window"), 64);
  EXPECT_TRUE(Uncalibrated({{"layer_a", int64_t{1}}}, kEightLayers));
}

TEST(FlatParams, AnotherSignOrWindowIsUncalibrated) {
  const std::map<std::string, ParamValue> inverted = {{"sign", int64_t{1}}};
  EXPECT_EQ(Resolve(inverted, kEightLayers).params.Int("layer_a"), 5);
  EXPECT_TRUE(Uncalibrated(inverted, kEightLayers));
  EXPECT_TRUE(Uncalibrated({{"window", int64_t{64}}}, kEightLayers));
  EXPECT_FALSE(Uncalibrated({{"slack", int64_t{8}}}, kEightLayers));
}

TEST(FlatParams, WithoutCalibrationDepthDecides) {
  struct {
    int64_t num_layers, a, b;
  } const cases[] = {{32, 10, 21}, {28, 9, 18}, {36, 11, 24}, {24, 7, 16}, {2, 0, 1}, {3, 0, 1}};
  for (const auto& c : cases) {
    const ModelShape shape{.num_layers = c.num_layers};
    const Params params = Resolve({}, shape).params;
    EXPECT_EQ(params.Int("layer_a"), c.a) << c.num_layers << " layers";
    EXPECT_EQ(params.Int("layer_b"), c.b) << c.num_layers << " layers";
    EXPECT_EQ(params.Int("sign"), 1);
    EXPECT_TRUE(Uncalibrated({}, shape));
  }
}

TEST(FlatParams, LayersAreReadAscending) {
  const Params params = Resolve({}, kEightLayers).params;
  EXPECT_THAT(Flat().traits(params, kEightLayers).residual_layers, ElementsAre(0, 5));
}

TEST(FlatParams, WhatCannotBeIsRefused) {
  auto refused = [](const std::map<std::string, ParamValue>& given, int64_t num_layers) {
    return !Resolve(given, {.num_layers = num_layers}).violations.empty();
  };
  EXPECT_TRUE(refused({{"layer_a", int64_t{8}}}, 8));
  EXPECT_TRUE(refused({{"layer_b", int64_t{8}}}, 8));
  EXPECT_TRUE(refused({{"layer_a", int64_t{3}}, {"layer_b", int64_t{3}}}, 8));
  EXPECT_TRUE(refused({{"sign", int64_t{0}}}, 8));
  EXPECT_TRUE(refused({{"window", int64_t{1}}}, 8));
  EXPECT_TRUE(refused({}, 1)) << "a model of one block has no two depths";
  EXPECT_FALSE(refused({}, 2));
}

}  // namespace flat_test
}  // namespace epikv
