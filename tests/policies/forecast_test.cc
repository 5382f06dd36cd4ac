#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "policies/expected_queries.h"
#include "policies/lane.h"
#include "policies/registry.h"
#include "tests/fixtures/fake_sequence.h"

// epikv_forecast is ours: its score against the definition, and what artefacts it takes.

namespace epikv {
namespace forecast_test {

using testing::HasSubstr;
using Row = std::vector<float>;

const PolicySpec& Forecast() { return *FindPolicy(AllPolicies(), "epikv_forecast"); }

constexpr char kAges[] = R"({"ages": [4, 32]})";

// Two query heads of one KV head of two channels, which do not turn; what a head's gate says is
// the two numbers that a layer's attention is given, at either age.
NamedArrays Arrays() {
  return {{"layers.0.linear1.weight", {{2, 2}, {1, 0, 0, 1}}},
          {"layers.0.linear1.bias", {{2}, {0, 0.25f}}},
          {"layers.0.query_mean", {{2, 2}, {1, 0.5f, -1, 2}}},
          {"layers.0.query_covariance", {{2, 2, 2}, {1, 0, 0, 0.5f, 0.25f, 0.125f, 0.125f, 2}}}};
}

ModelShape Shape() {
  return {.num_layers = 1,
          .num_heads = 2,
          .num_kv_heads = 1,
          .key_width = 2,
          .value_width = 2,
          .hidden_size = 2,
          .ropes = {RopeShape{}}};
}

absl::StatusOr<std::shared_ptr<const PolicyData>> Read(const std::string& json,
                                                       const NamedArrays& arrays) {
  return Forecast().read_data({.json = json, .arrays = arrays}, Shape());
}

FakeSequence::Options Options(int64_t budget, int64_t slack) {
  FakeSequence::Options options{
      .spec = &Forecast(), .params = {{"slack", slack}}, .prompt_tokens = 10, .budget = budget};
  options.shape = Shape();
  const auto read = Read(kAges, Arrays());
  EXPECT_TRUE(read.ok()) << read.status();
  options.shape.artefacts["epikv_forecast"] = *read;
  return options;
}

FakeWorld World() {
  FakeWorld world = RandomWorld(5, 1 << 20);
  const auto first_two = [](Row row) { return Row(row.begin(), row.begin() + 2); };
  world.key = [=, of = world.residual](int64_t, int64_t, int64_t token) {
    return first_two(of(50, token));
  };
  world.value = [=, of = world.residual](int64_t, int64_t, int64_t token) {
    return first_two(of(60, token));
  };
  world.attention_input = [=, of = world.attention_input](int64_t layer, int64_t token) {
    Row row = first_two(of(layer, token));
    row[1] *= -3;  // so that what is wanted of young tokens is not what is wanted of old ones
    return row;
  };
  world.attention_scale = 2;
  return world;
}

double Score(const FakeWorld& world, int64_t token, int64_t age) {
  if (token < CacheView::kFirstMeasuredQuery) return 1e30;  // the older goes
  const Row key = world.key(0, 0, token), value = world.value(0, 0, token);
  const Row given = world.attention_input(0, token);
  const NamedArrays arrays = Arrays();
  const Row &mean = arrays.at("layers.0.query_mean").values,
            &spread = arrays.at("layers.0.query_covariance").values;
  double expected = 0;
  for (int head = 0; head < 2; ++head) {
    double logit = 0;
    for (int i = 0; i < 2; ++i) {
      logit += world.attention_scale * mean[2 * head + i] * key[i];
      for (int j = 0; j < 2; ++j) {
        logit +=
            std::pow(world.attention_scale, 2) / 2 * key[i] * spread[4 * head + 2 * i + j] * key[j];
      }
    }
    expected += std::exp(logit);
  }
  const double young = given[0], old = given[1] + 0.25;
  const double beyond = std::clamp(std::log2(static_cast<double>(age) / 4) / 3, 0.0, 1.0);
  return std::log(expected) + std::log(std::hypot(value[0], value[1])) + (1 - beyond) * young +
         beyond * old;
}

TEST(EpikvForecast, DropsWhatIsWorthLeastAtTheAgeItHas) {
  for (int64_t slack : {0, 7}) {
    const FakeWorld world = World();
    FakeSequence sequence(Options(/*budget=*/30, slack), world);
    sequence.Prefill(10);
    std::vector<int32_t> cached(10);
    std::iota(cached.begin(), cached.end(), 0);
    int64_t rounds = 0, old = 0;
    while (sequence.newest() < 250) {
      sequence.Decode();
      const auto newest = static_cast<int32_t>(sequence.newest());
      cached.push_back(newest);
      if (std::ssize(cached) > 30 + slack) {
        ++rounds;
        std::stable_sort(cached.begin(), cached.end(), [&](int32_t a, int32_t b) {
          return Score(world, a, newest - a) > Score(world, b, newest - b);
        });
        for (size_t i = 30; i < cached.size(); ++i) old += newest - cached[i] >= 32;
        cached.resize(30);
        std::sort(cached.begin(), cached.end());
      }
      sequence.Round();
      ASSERT_EQ(sequence.Kept(), cached) << newest;
    }
    EXPECT_GT(rounds, 20);
    EXPECT_GT(old, 10);  // which the first age alone would have kept or dropped before
  }
}

// A prompt that does not fit is ranked as all else is, chunk by chunk.
TEST(EpikvForecast, RanksPrompts) {
  const FakeWorld world = World();
  FakeSequence::Options options = Options(/*budget=*/8, /*slack=*/0);
  FakeSequence sequence(options, world);
  sequence.Prefill(10);
  ASSERT_TRUE(sequence.OverBudget());
  sequence.Round();
  std::vector<int32_t> best(10);
  std::iota(best.begin(), best.end(), 0);
  std::sort(best.begin(), best.end(),
            [&](int32_t a, int32_t b) { return Score(world, a, 9 - a) > Score(world, b, 9 - b); });
  best.resize(8);
  EXPECT_THAT(sequence.Kept(), testing::UnorderedElementsAreArray(best));
}

// Behind a layer's window no query sees a token, whatever it was worth.
TEST(EpikvForecast, WhatAWindowHidesGoesFirst) {
  FakeWorld world = World();
  world.window = 25;
  FakeSequence sequence(Options(/*budget=*/30, /*slack=*/7), world);
  sequence.Prefill(10);
  while (sequence.newest() < 120) {
    sequence.Decode();
    if (sequence.Round().empty()) continue;
    const std::vector<int32_t> kept = sequence.Kept();
    for (int64_t back = 0; back < 24; ++back) {
      ASSERT_THAT(kept, testing::Contains(sequence.newest() - back));
    }
  }
}

// Of few keys (128) the keys are turned, of many the queries: the same is asked of each.
TEST(EpikvForecast, TurnedKeysAreAskedWhatTurnedQueriesAsk) {
  FakeSequence::Options options = Options(/*budget=*/30, /*slack=*/0);
  options.shape.ropes = {RopeShape{.inv_freq = {0.7}, .attention_factor = 1.25}};
  const FakeWorld world = World();
  FakeSequence sequence(options, world);
  sequence.Prefill(10);
  Lane lane(sequence, 0, 0);
  const at::Tensor keys = lane.keys();
  const NamedArrays arrays = Arrays();
  const auto of = [&](const char* name) {
    const NamedArray& array = arrays.at(name);
    return at::tensor(at::ArrayRef<float>(array.values)).view(array.shape);
  };
  const CacheView::QueryMoments moments{
      .count = 1, .mean = of("layers.0.query_mean"), .covariance = of("layers.0.query_covariance")};
  const ExpectedQueries queries{.future = 5};
  const RopeShape& rope = options.shape.ropes[0];
  const at::Tensor all = queries.Logits(lane, keys.repeat({20, 1}), moments, rope);
  for (int64_t key = 0; key < 10; ++key) {
    const at::Tensor alone = queries.Logits(lane, keys.narrow(0, key, 1), moments, rope);
    EXPECT_TRUE(at::allclose(alone, all.narrow(1, key, 1), 1e-5, 1e-6)) << key;
  }
  const at::Tensor unturned = queries.Logits(lane, keys.repeat({20, 1}), moments, RopeShape{});
  EXPECT_FALSE(at::allclose(all, unturned, 1e-2, 1e-2)) << "is no case";
}

// A value of nothing is worth nothing, and is no error.
TEST(EpikvForecast, ATokenWithoutAValueGoesFirst) {
  FakeWorld world = World();
  world.value = [of = world.value](int64_t layer, int64_t head, int64_t token) {
    return token == 12 ? Row{0, 0} : of(layer, head, token);
  };
  FakeSequence sequence(Options(/*budget=*/30, /*slack=*/0), world);
  sequence.Prefill(10);
  while (!sequence.OverBudget()) sequence.Decode();
  EXPECT_THAT(sequence.Round(), testing::ElementsAre(testing::ElementsAre(12)));
}

TEST(EpikvForecast, WhatIsNotANumberIsAnError) {
  FakeWorld world = World();
  world.attention_input = [of = world.attention_input](int64_t layer, int64_t token) {
    return token == 12 ? Row{std::numeric_limits<float>::quiet_NaN(), 0} : of(layer, token);
  };
  FakeSequence sequence(Options(/*budget=*/30, /*slack=*/0), world);
  sequence.Prefill(10);
  while (!sequence.OverBudget()) sequence.Decode();
  EXPECT_EQ(sequence.Ask().status.code(), absl::StatusCode::kInternal);
}

TEST(EpikvForecast, ATokenTakesItsAgesAndWhatItWasAsked) {
  const ModelShape shape = Options(30, 0).shape;
  const PolicyTraits traits = Forecast().traits(ResolveParams(Forecast(), {}, shape).params, shape);
  EXPECT_THAT(traits.columns, testing::ElementsAre("worth_0", "worth_1", "asked"));
  EXPECT_EQ(traits.gate_numbers, 2);
}

TEST(EpikvForecast, AnArtefactOfAnotherShapeIsRefused) {
  const auto said = [](const std::string& json, const NamedArrays& arrays) {
    return std::string(Read(json, arrays).status().message());
  };
  EXPECT_EQ(said(kAges, Arrays()), "");
  EXPECT_THAT(said("[]", Arrays()), HasSubstr("must be an object"));
  for (const char* ages : {"[]", "7", "[0, 4]", "[4, 4]", "[32, 4]", "[4, \"8\"]", "[4.5, 8]",
                           "[4, 1048577]", "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]"}) {
    EXPECT_THAT(said(absl::StrCat("{\"ages\": ", ages, "}"), Arrays()),
                HasSubstr("ages must be 1 to 12 numbers that ascend"))
        << ages;
  }
  EXPECT_THAT(said("{}", Arrays()), HasSubstr("ages must be"));
  EXPECT_THAT(said(R"({"ages": [4]})", Arrays()), HasSubstr("linear1.weight must be [1, 2]"));
  for (const char* missing : {"layers.0.query_mean", "layers.0.query_covariance",
                              "layers.0.linear1.bias", "layers.0.linear1.weight"}) {
    NamedArrays arrays = Arrays();
    arrays.erase(missing);
    EXPECT_THAT(said(kAges, arrays), HasSubstr(absl::StrCat(missing, " is missing")));
  }
  NamedArrays wrong = Arrays();
  wrong["layers.0.query_covariance"] = {{2, 2}, {1, 0, 0, 1}};
  EXPECT_THAT(said(kAges, wrong), HasSubstr("query_covariance must be [2, 2, 2], is [2, 2]"));
  NamedArrays more = Arrays();
  more["layers.1.query_mean"] = {{2, 2}, {1, 0, 0, 1}};
  EXPECT_THAT(said(kAges, more), HasSubstr("holds 3 arrays, and 2 are of the gate"));
}

}  // namespace forecast_test
}  // namespace epikv
