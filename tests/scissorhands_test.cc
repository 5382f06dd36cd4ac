#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "policies/registry.h"
#include "policies/scored_policy.h"
#include "tests/fake_sequence.h"
#include "tests/golden_world.h"

// scissorhands' `history = count`, of which there is no public code, against its definition, query
// by query.

namespace epikv {
namespace {

constexpr int64_t kTokens = 20, kWindow = 5, kGroup = 2, kWidth = 8;

TEST(Scissorhands, CountsQueriesThatGaveLessThanTheirMean) {
  FakeSequence sequence({.spec = FindPolicy(AllPolicies(), "scissorhands"),
                         .params = {{"window", kWindow}},
                         .shape = {.num_layers = 1,
                                   .num_heads = kGroup,
                                   .num_kv_heads = 1,
                                   .key_width = kWidth,
                                   .value_width = kWidth},
                         .prompt_tokens = kTokens,
                         .budget = kTokens - 1},
                        GoldenWorld(4, kGroup, 1, kWidth));
  sequence.Prefill(kTokens);
  const auto& policy = dynamic_cast<const ScoredPolicy&>(sequence.policy());
  const at::Tensor score = policy.ScoreAll(sequence.task())[0];

  const at::Tensor keys = sequence.keys(0, 0).to(at::kDouble);
  const at::Tensor queries = sequence.queries(0).to(at::kDouble);  // [w, group, width]
  std::vector<double> count(kTokens);
  for (int64_t t = 0; t < kWindow; ++t) {
    const int64_t seen = kTokens - kWindow + 1 + t;
    for (int64_t head = 0; head < kGroup; ++head) {
      const at::Tensor weight =
          (keys.matmul(queries[t][head]) * sequence.attention_scale(0)).exp().narrow(0, 0, seen);
      for (int64_t i = 0; i < seen; ++i) {
        const double share = (weight[i] / weight.sum()).item<double>();
        ASSERT_GT(std::abs(share * seen - 1), 1e-4) << "too near the mean to be a case";
        if (share < 1.0 / seen) count[i] += 1.0 / kGroup;
      }
    }
  }
  for (int64_t i = 0; i < kTokens; ++i) {
    EXPECT_EQ(score[i].item<double>(), -count[i]) << "token " << i;
  }
}

}  // namespace
}  // namespace epikv
