#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "policies/decorator.h"
#include "policies/recipe.h"
#include "policies/registry.h"
#include "policies/scored_policy.h"
#include "tests/fixtures/fake_sequence.h"
#include "tests/fixtures/golden_world.h"

// `caote` claims to be the change of the attention output when a token goes and the weights of the
// others are brought back to a sum of 1. Here that change is measured.

namespace epikv {
namespace caote_test {

class CaoteTest : public testing::Test {
 protected:
  static constexpr int64_t kTokens = 24, kWidth = 8;

  static FakeSequence Sequence(int64_t heads = 1) {
    FakeSequence sequence(
        {.spec = FindPolicy(AllPolicies(), "snapkv"),
         .params = {{"decorate", std::vector<std::string>{"caote"}}, {"window", int64_t{1}}},
         .shape = {.num_layers = 1,
                   .num_heads = heads,
                   .num_kv_heads = heads,
                   .key_width = kWidth,
                   .value_width = kWidth},
         .prompt_tokens = kTokens,
         .budget = kTokens},
        GoldenWorld(5, heads, heads, kWidth));
    sequence.Prefill(kTokens);
    return sequence;
  }

  // |o - o without the token|, for each.
  static std::vector<double> Measured(const at::Tensor& attention, const at::Tensor& values) {
    const at::Tensor weight = attention.to(at::kDouble), rows = values.to(at::kDouble);
    const at::Tensor output = weight.matmul(rows) / weight.sum();
    std::vector<double> change;
    for (int64_t token = 0; token < kTokens; ++token) {
      at::Tensor others = weight.clone();
      others[token] = 0;
      change.push_back((output - others.matmul(rows) / others.sum()).norm().item<double>());
    }
    return change;
  }

  static void ExpectMeasured(const at::Tensor& mass, Lane& lane) {
    const at::Tensor score = FindDecorator("caote")->make(0)->Apply(mass, lane);
    const std::vector<double> measured = Measured(mass, lane.values());
    for (int64_t token = 0; token < kTokens; ++token) {
      EXPECT_NEAR(score[token].item<double>(), measured[token], 1e-5) << "token " << token;
    }
  }
};

TEST_F(CaoteTest, IsTheMeasuredChangeOfTheOutput) {
  FakeSequence sequence = Sequence();
  Lane lane(sequence, 0, 0);
  const at::Tensor attention = lane.window_attention()[0][0];
  // A case that tells: weights of all sizes.
  ASSERT_GT(attention.max().item<float>(), 0.2f);
  ASSERT_LT(attention.min().item<float>(), 0.01f);
  ExpectMeasured(attention, lane);
}

// Each head's newest query, output and values are its own.
TEST_F(CaoteTest, IsThatOfEachHead) {
  FakeSequence sequence = Sequence(3);
  for (int64_t head = 0; head < 3; ++head) {
    SCOPED_TRACE(head);
    Lane lane(sequence, 0, head);
    const at::Tensor attention = lane.window_attention()[0][0];
    ASSERT_GT(attention.max().item<float>(), 0.1f);
    ExpectMeasured(attention, lane);
  }
}

// The weights are proportions of whatever masses it is given.
TEST_F(CaoteTest, TakesAnyMass) {
  FakeSequence sequence = Sequence();
  Lane lane(sequence, 0, 0);
  ExpectMeasured(lane.window_attention()[0][0] * 7, lane);
}

// The mean of the cached values stands for the output.
TEST_F(CaoteTest, FastTakesTheMeanForTheOutput) {
  FakeSequence sequence = Sequence();
  Lane lane(sequence, 0, 0);
  const at::Tensor uniform = at::full(kTokens, 1.0 / kTokens);
  const at::Tensor score = FindDecorator("fast_caote")->make(0)->Apply(uniform, lane);
  const std::vector<double> measured = Measured(uniform, lane.values());
  for (int64_t token = 0; token < kTokens; ++token) {
    EXPECT_NEAR(score[token].item<double>(), measured[token], 1e-5) << "token " << token;
  }
  const at::Tensor attention = lane.window_attention()[0][0];
  const at::Tensor other = FindDecorator("fast_caote")->make(0)->Apply(attention, lane);
  EXPECT_FALSE(at::allclose(other, FindDecorator("caote")->make(0)->Apply(attention, lane)));
}

// SnapKV ranks the tokens of its window first, with the highest score of the others: that is no
// weight. The others' are what the window's queries give them.
TEST_F(CaoteTest, TokensOfTheWindowHaveNoWeight) {
  constexpr int64_t kWindow = 6;
  FakeSequence sequence({.spec = FindPolicy(AllPolicies(), "snapkv"),
                         .params = {{"decorate", std::vector<std::string>{"caote"}},
                                    {"window", kWindow},
                                    {"kernel", int64_t{1}}},
                         .shape = {.num_layers = 1,
                                   .num_heads = 1,
                                   .num_kv_heads = 1,
                                   .key_width = kWidth,
                                   .value_width = kWidth},
                         .prompt_tokens = kTokens,
                         .budget = kTokens - 1},
                        GoldenWorld(5, 1, 1, kWidth));
  sequence.Prefill(kTokens);
  Lane lane(sequence, 0, 0);
  at::Tensor weight = lane.window_attention()[0].mean(0);
  weight.narrow(0, kTokens - kWindow, kWindow).zero_();
  const std::vector<double> measured = Measured(weight, lane.values());
  const auto& policy = dynamic_cast<const ScoredPolicy&>(sequence.policy());
  const at::Tensor score = policy.ScoreAll(sequence.task())[0];
  const double highest = score.narrow(0, 0, kTokens - kWindow).max().item<double>();
  for (int64_t token = 0; token < kTokens; ++token) {
    const double expected = token < kTokens - kWindow ? measured[token] : highest;
    EXPECT_NEAR(score[token].item<double>(), expected, 1e-5) << "token " << token;
  }
}

}  // namespace caote_test
}  // namespace epikv
