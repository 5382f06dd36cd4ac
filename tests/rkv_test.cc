#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

#include "policies/registry.h"
#include "policies/scored_policy.h"
#include "tests/fake_sequence.h"
#include "tests/golden_world.h"

// rkv's `redundancy = linear`, which no published code has in this form, against the matrix of
// cosines that it never makes.

namespace epikv {
namespace {

constexpr int64_t kTokens = 30, kWidth = 4;

at::Tensor Scores(FakeSequence& sequence) {
  return dynamic_cast<const ScoredPolicy&>(sequence.policy()).ScoreAll(sequence.task())[0];
}

TEST(RKv, LinearBlamesEveryDuplicate) {
  FakeSequence sequence(
      {.spec = FindPolicy(AllPolicies(), "rkv"),
       .params = {{"redundancy", std::string("linear")}, {"lambda", 0.0}, {"window", int64_t{1}}},
       .shape = {.num_layers = 1,
                 .num_heads = 1,
                 .num_kv_heads = 1,
                 .key_width = kWidth,
                 .value_width = kWidth},
       .prompt_tokens = kTokens,
       .budget = kTokens - 1},
      GoldenWorld(3, 1, 1, kWidth));
  sequence.Prefill(kTokens);
  const at::Tensor score = Scores(sequence);

  const at::Tensor keys = sequence.keys(0, 0).to(at::kDouble);
  std::vector<double> similarity(kTokens);
  for (int64_t i = 0; i < kTokens; ++i) {
    for (int64_t j = 0; j < kTokens; ++j) {
      if (i == j) continue;
      const double cosine = (keys[i].dot(keys[j]) / keys[i].norm() / keys[j].norm()).item<double>();
      similarity[i] += cosine / kTokens;
    }
  }
  const at::Tensor redundancy = at::tensor(similarity, at::kDouble).softmax(0);
  for (int64_t i = 0; i + 1 < kTokens; ++i) {  // the newest is the window
    EXPECT_NEAR(score[i].item<double>(), -redundancy[i].item<double>(), 1e-6) << "token " << i;
  }
}

}  // namespace
}  // namespace epikv
