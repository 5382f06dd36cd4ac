#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "policies/decorator.h"
#include "policies/recipe.h"
#include "policies/registry.h"
#include "tests/fixtures/fake_sequence.h"
#include "tests/fixtures/golden_world.h"

// Decorators that no public code is of, by hand.

namespace epikv {
namespace decorators_test {

using testing::ElementsAre;

// One lane of a prompt, whose keys point at these angles.
FakeSequence Sequence(const std::string& decorator, const std::vector<double>& degrees,
                      int64_t budget, Protection protection = {}) {
  FakeWorld world = GoldenWorld(5, 1, 1, 2);
  world.key = [degrees](int64_t, int64_t, int64_t token) {
    const double angle = degrees[token] / 180 * 3.14159265358979;
    return std::vector<float>{static_cast<float>(3 * std::cos(angle)),
                              static_cast<float>(3 * std::sin(angle))};
  };
  FakeSequence sequence(
      {.spec = FindPolicy(AllPolicies(), "snapkv"),
       .params = {{"decorate", std::vector<std::string>{decorator}}, {"window", int64_t{1}}},
       .shape =
           {.num_layers = 1, .num_heads = 1, .num_kv_heads = 1, .key_width = 2, .value_width = 2},
       .protection = protection,
       .prompt_tokens = std::ssize(degrees),
       .budget = budget},
      world);
  sequence.Prefill(std::ssize(degrees));
  return sequence;
}

std::vector<float> Apply(const std::string& decorator, const std::vector<float>& score,
                         Lane& lane) {
  const at::Tensor result =
      FindDecorator(decorator)->make(0)->Apply(at::tensor(score), lane).contiguous();
  return {result.const_data_ptr<float>(), result.const_data_ptr<float>() + result.numel()};
}

TEST(Inertia, IsAMeanOverRounds) {
  FakeSequence sequence = Sequence("inertia", {0, 10, 20}, 3);
  Lane lane(sequence, 0, 0);
  EXPECT_THAT(Apply("inertia", {1, 2, 3}, lane), ElementsAre(1, 2, 3));  // the first round
  const std::vector<float> second = Apply("inertia", {2, 2, 1}, lane);
  EXPECT_NEAR(second[0], 0.7 * 1 + 0.3 * 2, 1e-6);
  EXPECT_NEAR(second[1], 2, 1e-6);
  EXPECT_NEAR(second[2], 0.7 * 3 + 0.3 * 1, 1e-6);
  EXPECT_NEAR(Apply("inertia", {0, 0, 0}, lane)[0], 0.7 * 1.3, 1e-6);
}

TEST(Inertia, TokensOfAWindowHaveNoPast) {
  FakeSequence sequence = Sequence("inertia", {0, 10, 20}, 3);
  Lane lane(sequence, 0, 0);
  lane.set_unscored(at::tensor({int64_t{2}}));
  EXPECT_THAT(Apply("inertia", {1, 2, 9}, lane), ElementsAre(1, 2, 9));
  Lane later(sequence, 0, 0);
  EXPECT_THAT(Apply("inertia", {1, 2, 5}, later)[2], 5);  // its first score
}

// Of two victims, 0 has a twin that stays, and 1 has none: 1 takes the place of 2, the worst that
// has a twin besides.
TEST(Twin, OrphansTakeThePlacesOfTwins) {
  FakeSequence sequence = Sequence("twin", {0, 90, 2, 4, 180, 270}, 4);
  Lane lane(sequence, 0, 0);
  EXPECT_THAT(Apply("twin", {1, 2, 3, 4, 5, 6}, lane), ElementsAre(1, 3, 2, 4, 5, 6));
}

// Both are twins of each other alone: once the first has left, the second has none.
TEST(Twin, OneOfAPairStays) {
  FakeSequence sequence = Sequence("twin", {90, 180, 0, 2, 270}, 3);
  Lane lane(sequence, 0, 0);
  EXPECT_THAT(Apply("twin", {1, 2, 3, 4, 5}, lane), ElementsAre(1, 3, 2, 4, 5));
}

TEST(Twin, ProtectedTokensStay) {
  FakeSequence sequence = Sequence("twin", {2, 90, 4, 180}, 3, {.prompt = 0, .sinks = 1});
  Lane lane(sequence, 0, 0);
  // Token 0 would be the worst, and be a twin of 2, which is one of its in turn.
  EXPECT_THAT(Apply("twin", {0, 1, 3, 4}, lane), ElementsAre(0, 3, 1, 4));
}

// Of a thousand victims none has a twin that stays. As many places change as the best 256 have.
TEST(Twin, OfManyVictimsTheBestAreLookedAt) {
  std::vector<double> degrees;
  for (int i = 0; i < 1000; ++i) degrees.push_back(i % 2 == 0 ? 90 : 180);
  for (int i = 0; i < 1100; ++i) degrees.push_back(0);
  FakeSequence sequence = Sequence("twin", degrees, 1100);
  Lane lane(sequence, 0, 0);
  std::vector<float> score(2100);
  std::iota(score.begin(), score.end(), 1.f);
  const std::vector<float> result = Apply("twin", score, lane);
  EXPECT_EQ(result[999], 1001) << "of those alike, the best is the orphan";
  EXPECT_EQ(result[998], 1002);
  EXPECT_EQ(result[997], 998);
  // Alone and worse than 256 others: it stays where it is.
  degrees[743] = 270;
  FakeSequence other = Sequence("twin", degrees, 1100);
  Lane of_other(other, 0, 0);
  EXPECT_EQ(Apply("twin", score, of_other)[743], 744);
  degrees[743] = 180, degrees[744] = 270;
  FakeSequence third = Sequence("twin", degrees, 1100);
  Lane of_third(third, 0, 0);
  EXPECT_NE(Apply("twin", score, of_third)[744], 745);
}

TEST(Twin, WithoutOrphansOrTwinsNothingChanges) {
  FakeSequence sequence = Sequence("twin", {0, 60, 120, 180}, 3);
  Lane lane(sequence, 0, 0);
  EXPECT_THAT(Apply("twin", {1, 2, 3, 4}, lane), ElementsAre(1, 2, 3, 4));
  FakeSequence alike = Sequence("twin", {0, 1, 2, 3}, 3);
  Lane of_one(alike, 0, 0);
  EXPECT_THAT(Apply("twin", {1, 2, 3, 4}, of_one), ElementsAre(1, 2, 3, 4));
}

TEST(Twin, WhatIsNoNumberStaysNone) {
  FakeSequence sequence = Sequence("twin", {0, 90, 2, 4}, 3);
  Lane lane(sequence, 0, 0);
  EXPECT_TRUE(
      std::isnan(Apply("twin", {std::numeric_limits<float>::quiet_NaN(), 1, 2, 3}, lane)[0]));
}

}  // namespace decorators_test
}  // namespace epikv
