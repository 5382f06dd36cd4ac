#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

#include "policies/decorator.h"
#include "policies/recipe.h"
#include "policies/registry.h"
#include "tests/fixtures/fake_sequence.h"
#include "tests/fixtures/golden_world.h"

// `critical` where its golden, kvpress's CriticalKVPress, says nothing.

namespace epikv {
namespace critical_test {

constexpr int64_t kTokens = 24, kWidth = 8;
constexpr float kMost = std::numeric_limits<float>::max();

FakeSequence Sequence(const FakeWorld& world) {
  FakeSequence sequence(
      {.spec = FindPolicy(AllPolicies(), "snapkv"),
       .params = {{"decorate", std::vector<std::string>{"critical"}}, {"window", int64_t{1}}},
       .shape = {.num_layers = 1,
                 .num_heads = 1,
                 .num_kv_heads = 1,
                 .key_width = kWidth,
                 .value_width = kWidth},
       .prompt_tokens = kTokens,
       .budget = kTokens - 2},
      world);
  sequence.Prefill(kTokens);
  return sequence;
}

at::Tensor Apply(FakeSequence& sequence, const at::Tensor& score) {
  Lane lane(sequence, 0, 0);
  return FindDecorator("critical")->make(0)->Apply(score, lane);
}

// The best half of a budget of 22.
TEST(Critical, OfEqualsTheNewerAreInTheBestHalf) {
  FakeSequence sequence = Sequence(GoldenWorld(5, 1, 1, kWidth));
  std::mt19937 random(1);
  for (int order = 0; order < 5; ++order) {
    const at::Tensor score = Apply(sequence, at::full({kTokens}, 0.25));
    const absl::Span<const int32_t> index = sequence.index(0, 0);
    for (int64_t slot = 0; slot < kTokens; ++slot) {
      EXPECT_EQ(score[slot].item<float>() == kMost, index[slot] >= kTokens - 11) << index[slot];
    }
    sequence.Shuffle(random);
  }
}

TEST(Critical, TheBestHalfHidesNoNaN) {
  FakeWorld world = GoldenWorld(5, 1, 1, kWidth);
  world.value = [good = world.value](int64_t layer, int64_t head, int64_t token) {
    std::vector<float> row = good(layer, head, token);
    if (token == 20) row[0] = std::numeric_limits<float>::quiet_NaN();
    return row;
  };
  FakeSequence sequence = Sequence(world);
  const at::Tensor score = Apply(sequence, at::arange(kTokens, at::kFloat));
  EXPECT_TRUE(score[20].isnan().item<bool>());
  EXPECT_EQ(score[21].item<float>(), kMost);
}

}  // namespace critical_test
}  // namespace epikv
