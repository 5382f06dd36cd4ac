#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "absl/strings/str_cat.h"
#include "policies/policy.h"
#include "policies/registry.h"
#include "policies/scored_policy.h"
#include "tests/fixtures/artefacts.h"
#include "tests/fixtures/fake_sequence.h"

// trimkv and dbtrimkv against the definition, spelt out in double; goldens compare them with the
// authors' code.

namespace epikv {
namespace retention_test {

using testing::HasSubstr;

const PolicySpec& Spec(absl::string_view name) { return *FindPolicy(AllPolicies(), name); }

std::vector<double> Map(const NamedArrays& arrays, const std::string& name,
                        const std::vector<double>& x) {
  const NamedArray& weight = arrays.at(name + ".weight");
  const NamedArray& bias = arrays.at(name + ".bias");
  std::vector<double> y;
  for (int64_t row = 0; row < weight.shape[0]; ++row) {
    double sum = bias.values[row];
    for (size_t c = 0; c < x.size(); ++c) sum += weight.values[row * x.size() + c] * x[c];
    y.push_back(sum);
  }
  return y;
}

// log beta of each KV head.
std::vector<double> LogBeta(const NamedArrays& arrays, int64_t layer, int64_t depth,
                            const std::vector<float>& input) {
  std::vector<double> x(input.begin(), input.end());
  for (int64_t i = 1; i <= depth; ++i) {
    if (i > 1) {
      for (double& number : x) number /= 1 + std::exp(-number);
    }
    x = Map(arrays, absl::StrCat("layers.", layer, ".linear", i), x);
  }
  for (double& number : x) number = -std::log1p(std::exp(-number));
  return x;
}

class Retention : public testing::TestWithParam<const char*> {
 protected:
  const PolicySpec& spec() const { return Spec(GetParam()); }
  int64_t depth() const { return std::string(GetParam()) == "trimkv" ? 2 : 3; }
  FakeSequence::Options Options() const {
    return {.spec = &spec(),
            .params = {{"slack", int64_t{0}}},
            .prompt_tokens = 12,
            .budget = 20,
            .seed = 3};
  }
};

TEST_P(Retention, ScoresAreWhatIsLeftOfATokensWorth) {
  const FakeWorld world = RandomWorld(5, 1 << 20);
  const NamedArrays arrays = ArtefactOf(spec(), Options().shape).arrays;
  for (const int64_t lookahead : {1, 2, 32}) {
    FakeSequence::Options options = Options();
    options.params["lookahead"] = lookahead;
    FakeSequence sequence(options, world);
    sequence.Prefill(5);
    sequence.Prefill(7);
    while (!sequence.OverBudget()) sequence.Decode();
    const auto& policy = dynamic_cast<const ScoredPolicy&>(sequence.policy());
    const std::vector<at::Tensor> scores = policy.ScoreAll(sequence.task());
    for (size_t lane = 0; lane < scores.size(); ++lane) {
      const int64_t layer = static_cast<int64_t>(lane) / 2, head = static_cast<int64_t>(lane) % 2;
      const absl::Span<const int32_t> index = sequence.index(layer, head);
      for (size_t slot = 0; slot < index.size(); ++slot) {
        const double beta = std::exp(
            LogBeta(arrays, layer, depth(), world.attention_input(layer, index[slot]))[head]);
        // The next step counts as one later than it is; of several, as two.
        const double age = static_cast<double>(sequence.newest()) + 2 - index[slot];
        double worth = lookahead == 1 ? std::pow(beta, age) : 0;
        for (int64_t step = 1; lookahead > 1 && step <= lookahead; ++step) {
          worth += std::pow(beta, age + static_cast<double>(step));
        }
        const double wanted = std::log(worth);
        EXPECT_NEAR(scores[lane][static_cast<int64_t>(slot)].item<double>(), wanted,
                    1e-4 * (1 + std::abs(wanted)))
            << "lookahead " << lookahead << ", lane " << lane << ", token " << index[slot];
      }
    }
  }
}

// Beta is 1 in fp32.
TEST_P(Retention, WhatIsNeverForgottenIsAScoreLikeAnother) {
  FakeSequence::Options options = Options();
  NamedArrays arrays = ArtefactOf(spec(), options.shape).arrays;
  for (int64_t layer = 0; layer < 3; ++layer) {
    for (float& bias : arrays[absl::StrCat("layers.", layer, ".linear", depth(), ".bias")].values) {
      bias = 200;
    }
  }
  auto gate = spec().read_data({.json = "{}", .arrays = arrays}, options.shape);
  ASSERT_TRUE(gate.ok()) << gate.status();
  options.shape.artefacts[GetParam()] = *gate;
  for (const int64_t lookahead : {1, 32}) {
    options.params["lookahead"] = lookahead;
    FakeSequence sequence(options, RandomWorld(5, 1 << 20));
    while (sequence.newest() < 59) {
      sequence.Decode();
      sequence.Round();
    }
    EXPECT_EQ(sequence.Kept().front(), 40) << "all tie, so the newest stay";
  }
}

TEST_P(Retention, AGateOfAnotherShapeIsRefused) {
  const ModelShape shape = Options().shape;
  auto said = [&](const std::function<void(NamedArrays&)>& spoil) {
    NamedArrays arrays = ArtefactOf(spec(), shape).arrays;
    spoil(arrays);
    const auto data = spec().read_data({.json = "{}", .arrays = arrays}, shape);
    return std::string(data.status().message());
  };
  EXPECT_EQ(said([](NamedArrays&) {}), "");
  EXPECT_EQ(said([](NamedArrays& a) { a.erase("layers.1.linear2.bias"); }),
            "layers.1.linear2.bias is missing");
  EXPECT_EQ(said([](NamedArrays& a) {
              a["layers.0.linear1.weight"].shape = {8, 3};
            }),
            "layers.0.linear1.weight must be [any, 4], is [8, 3]");
  EXPECT_EQ(said([](NamedArrays& a) {
              a["layers.2.linear1.bias"].shape = {2, 3};
            }),
            "layers.2.linear1.bias must be [6], is [2, 3]");
  EXPECT_THAT(said([](NamedArrays& a) {
                a["layers.3.linear1.weight"] = {{1}, {0}};
              }),
              HasSubstr("are of the gate"));
  EXPECT_EQ(said([](NamedArrays& a) { a.clear(); }), "layers.0.linear1.weight is missing");
}

INSTANTIATE_TEST_SUITE_P(Policies, Retention, testing::Values("trimkv", "dbtrimkv"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace retention_test
}  // namespace epikv
