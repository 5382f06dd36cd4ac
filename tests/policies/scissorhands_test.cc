#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <tuple>
#include <vector>

#include "policies/registry.h"
#include "policies/scored_policy.h"
#include "tests/fixtures/fake_sequence.h"
#include "tests/fixtures/golden_world.h"

// scissorhands' `history = count`, of which there is no public code, against its definition, query
// by query.

namespace epikv {
namespace scissorhands_test {

constexpr int64_t kWindow = 40, kGroup = 2, kWidth = 8;

class ScissorhandsIn : public ::testing::TestWithParam<FakeWorld> {};

// Once rounds have taken tokens of the window too, and so many in one that the oldest queries see
// none of those that are left.
TEST_P(ScissorhandsIn, CountsQueriesThatGaveLessThanTheirMean) {
  for (const auto& [tokens, budget, decoded] :
       {std::tuple<int64_t, int64_t, int64_t>{90, 89, 0}, {90, 70, 30}, {90, 12, 25}}) {
    SCOPED_TRACE(budget);
    FakeSequence sequence({.spec = FindPolicy(AllPolicies(), "scissorhands"),
                           .params = {{"window", kWindow}, {"slack", int64_t{3}}},
                           .shape = {.num_layers = 1,
                                     .num_heads = kGroup,
                                     .num_kv_heads = 1,
                                     .key_width = kWidth,
                                     .value_width = kWidth},
                           .prompt_tokens = tokens,
                           .budget = budget},
                          GetParam());
    sequence.Prefill(tokens);
    for (int64_t i = 0; i < decoded; ++i) {
      sequence.Round();
      sequence.Decode();
    }
    while (!sequence.OverBudget()) sequence.Decode();
    std::mt19937 random(1);
    sequence.Shuffle(random);
    const auto& policy = dynamic_cast<const ScoredPolicy&>(sequence.policy());
    const at::Tensor score = policy.ScoreAll(sequence.task())[0];

    const absl::Span<const int32_t> index = sequence.index(0, 0);
    const at::Tensor keys = sequence.keys(0, 0).to(at::kDouble);
    const at::Tensor queries = sequence.queries(0).to(at::kDouble);  // [w, group, width]
    std::vector<double> count(index.size());
    int64_t blind = 0;
    for (int64_t t = 0; t < kWindow; ++t) {
      const int64_t asked = sequence.newest() + 1 - kWindow + t;
      const AttentionFacts attention = sequence.attention(0);
      auto sees = [=](int32_t token) {
        return token <= asked && token > asked - attention.window.value_or(1 << 20);
      };
      const int64_t seen = std::count_if(index.begin(), index.end(), sees);
      blind += seen == 0 ? 1 : 0;
      for (int64_t head = 0; head < kGroup; ++head) {
        const double cap = attention.soft_cap.value_or(1e9);
        const at::Tensor weight =
            ((keys.matmul(queries[t][head]) * attention.scale / cap).tanh() * cap).exp();
        double sum = 0;
        for (size_t slot = 0; slot < index.size(); ++slot) {
          if (sees(index[slot])) sum += weight[slot].item<double>();
        }
        for (size_t slot = 0; slot < index.size(); ++slot) {
          if (!sees(index[slot])) continue;
          const double share = weight[slot].item<double>() / sum;
          ASSERT_TRUE(seen == 1 || std::abs(share * seen - 1) > 1e-5) << "too near the mean";
          if (share < (1 - 1e-6) / seen) count[slot] += 1.0 / kGroup;
        }
      }
    }
    for (size_t slot = 0; slot < index.size(); ++slot) {
      EXPECT_EQ(score[slot].item<double>(), -count[slot]) << "token " << index[slot];
    }
    EXPECT_EQ(blind > 0, budget == 12) << blind;
  }
}

// The window is narrower than the policy's, so that the oldest tokens are seen by no query of it.
INSTANTIATE_TEST_SUITE_P(Worlds, ScissorhandsIn,
                         ::testing::Values(GoldenWorld(4, kGroup, 1, kWidth),
                                           BentWorld(4, kGroup, 1, kWidth, 1.0, 30)),
                         [](const auto& info) { return info.index == 0 ? "plain" : "bent"; });

}  // namespace scissorhands_test
}  // namespace epikv
