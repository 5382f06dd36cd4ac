#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "policies/registry.h"
#include "policies/scored_policy.h"
#include "tests/fixtures/fake_sequence.h"
#include "tests/fixtures/golden_world.h"

// rkv's redundancy against the matrix of cosines that it never makes: what no published code has
// (linear), and longer lanes than golden/policies/rkv.json's.

namespace epikv {
namespace rkv_test {

// How a key's channels are many, its duplicates are few: at 4, most tokens have one among the
// newest; at 32, some have none at all.
using Case = std::tuple<std::string, bool, int64_t>;  // redundancy, compat, width
class RKvRedundancy : public testing::TestWithParam<Case> {};

TEST_P(RKvRedundancy, IsThatOfTheMatrixOfCosines) {
  constexpr int64_t kTokens = 700;
  constexpr double kDuplicate = 0.5;
  const auto& [redundancy, compat, width] = GetParam();
  FakeSequence sequence({.spec = FindPolicy(AllPolicies(), "rkv"),
                         .params = {{"redundancy", redundancy},
                                    {"compat", compat},
                                    {"lambda", 0.0},
                                    {"window", int64_t{1}}},
                         .shape = {.num_layers = 1,
                                   .num_heads = 1,
                                   .num_kv_heads = 1,
                                   .key_width = width,
                                   .value_width = width},
                         .prompt_tokens = kTokens,
                         .budget = kTokens - 1},
                        GoldenWorld(3, 1, 1, width));
  sequence.Prefill(kTokens);
  const at::Tensor keys = sequence.keys(0, 0).to(at::kDouble);  // in birth order
  std::mt19937 random(1);
  sequence.Shuffle(random);
  const auto& policy = dynamic_cast<const ScoredPolicy&>(sequence.policy());
  const at::Tensor score = policy.ScoreAll(sequence.task())[0];

  const at::Tensor unit = keys / keys.norm(2, -1, true);
  at::Tensor cosine = unit.matmul(unit.t()).fill_diagonal_(0);
  if (redundancy == "exact") {
    int64_t without = 0;
    for (int64_t i = 0; i < kTokens; ++i) {
      const at::Tensor duplicates = (cosine[i] > kDuplicate).nonzero();
      without += duplicates.numel() == 0 ? 1 : 0;
      if (duplicates.numel() > 0) {
        cosine[i][duplicates.max()] = 0;
      } else if (compat) {
        cosine[i][0] = 0;
      }
    }
    if (width == 32) {
      EXPECT_GT(without, 0) << "no token without a duplicate";
    }
  }
  const at::Tensor expected = cosine.mean(0).softmax(0);
  for (int64_t slot = 0; slot < kTokens; ++slot) {
    const int64_t token = sequence.index(0, 0)[slot];
    if (token == kTokens - 1) continue;  // the newest is the window
    EXPECT_NEAR(-score[slot].item<double>() / expected[token].item<double>(), 1, 1e-5)
        << "token " << token;
  }
}

std::string Name(const testing::TestParamInfo<Case>& info) {
  const auto& [redundancy, compat, width] = info.param;
  return redundancy + (compat ? "_compat_" : "_") + std::to_string(width);
}

INSTANTIATE_TEST_SUITE_P(RKv, RKvRedundancy,
                         testing::Values(Case{"linear", false, 4}, Case{"exact", false, 4},
                                         Case{"exact", false, 16}, Case{"exact", false, 32},
                                         Case{"exact", true, 32}),
                         &Name);

// What a round knows of duplicates from those before is what it would find without them, also where
// they took a token's newest duplicate: victims are others than the policy's, which spares those.
TEST(RKv, DuplicatesAreThoseOfTheTokensThatAreLeft) {
  constexpr int64_t kPrompt = 300, kWidth = 8;
  FakeSequence sequence({.spec = FindPolicy(AllPolicies(), "rkv"),
                         .params = {{"lambda", 0.0}, {"window", int64_t{1}}, {"slack", int64_t{7}}},
                         .shape = {.num_layers = 1,
                                   .num_heads = 1,
                                   .num_kv_heads = 1,
                                   .key_width = kWidth,
                                   .value_width = kWidth},
                         .prompt_tokens = kPrompt,
                         .budget = kPrompt - 1},
                        GoldenWorld(3, 1, 1, kWidth));
  sequence.Prefill(kPrompt);
  std::mt19937 random(1);
  int64_t bereft = 0;
  for (int64_t round = 0; round < 20; ++round) {
    while (!sequence.OverBudget()) sequence.Decode();
    sequence.Shuffle(random);
    const absl::Span<const int32_t> index = sequence.index(0, 0);
    const absl::Span<const float> duplicate = sequence.column(0, 0, 0);
    bereft += std::count_if(duplicate.begin(), duplicate.end(), [&](float noted) {
      return noted > 0 && std::find(index.begin(), index.end(), noted - 1) == index.end();
    });
    FakeSequence unaware(sequence);
    const absl::Span<float> unknown = unaware.column(0, 0, 0);
    std::fill(unknown.begin(), unknown.end(), 0.0f);
    const auto& policy = dynamic_cast<const ScoredPolicy&>(sequence.policy());
    const at::Tensor score = policy.ScoreAll(sequence.task())[0];
    EXPECT_TRUE(at::allclose(score, policy.ScoreAll(unaware.task())[0], 1e-6, 0))
        << "round " << round;
    std::vector<int32_t> victims(index.begin(), index.end());
    std::erase(victims, static_cast<int32_t>(sequence.newest()));
    std::shuffle(victims.begin(), victims.end(), random);
    victims.resize(sequence.excess(0, 0));
    sequence.Drop({.victims = {victims}});
  }
  EXPECT_GT(bereft, 20);
}

}  // namespace rkv_test
}  // namespace epikv
