#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "policies/registry.h"
#include "policies/scored_policy.h"
#include "tests/fixtures/fake_sequence.h"
#include "tests/fixtures/golden_world.h"

// LaProx (arXiv 2605.07234) has no public code: its score against the definition, spelt out.

namespace epikv {
namespace laprox_test {

constexpr int64_t kLayers = 2, kHeads = 4, kKvHeads = 2, kGroup = 2, kWidth = 8, kWindow = 6;

at::Tensor Rows(const std::function<std::vector<float>(int64_t, int64_t, int64_t)>& rows,
                int64_t layer, int64_t head, const std::vector<int32_t>& tokens) {
  std::vector<at::Tensor> all;
  for (int32_t token : tokens) all.push_back(at::tensor(rows(layer, head, token)));
  return at::stack(all).to(at::kDouble);
}

// Of one lane, without pooling, before its layer is normalised: the mean over the group of
// |A[:, i]| |v_i W_O[h]|, in fp64, W_O itself in place of its Gram matrix. In birth order, the
// window's tokens left out.
at::Tensor Definition(const FakeWorld& world, const std::vector<int32_t>& kept, int64_t newest,
                      int64_t layer, int64_t head) {
  const int64_t before = static_cast<int64_t>(kept.size()) - kWindow;
  at::Tensor sum = at::zeros(before, at::kDouble);
  for (int64_t member = 0; member < kGroup; ++member) {
    const int64_t query_head = head * kGroup + member;
    at::Tensor seen = at::zeros(before, at::kDouble);  // |A[:, i]|^2
    for (int64_t query = newest - kWindow + 1; query <= newest; ++query) {
      const at::Tensor q = at::tensor(world.query(layer, query_head, query)).to(at::kDouble);
      std::vector<int32_t> visible;
      for (int32_t token : kept) {
        if (token <= query) visible.push_back(token);
      }
      const at::Tensor attention =
          (Rows(world.key, layer, head, visible).matmul(q) * world.attention_scale).softmax(0);
      seen += attention.narrow(0, 0, before).square();
    }
    std::vector<at::Tensor> rows;
    for (int64_t channel = 0; channel < kWidth; ++channel) {
      rows.push_back(at::tensor(world.output(layer, query_head, channel)).to(at::kDouble));
    }
    const at::Tensor projected =
        Rows(world.value, layer, head, kept).narrow(0, 0, before).matmul(at::stack(rows));
    sum += seen.sqrt() * projected.norm(2, -1);
  }
  return sum / static_cast<double>(kGroup);
}

TEST(LaProx, ScoreIsTheDefinitionNormalisedByLayer) {
  const FakeWorld world = GoldenWorld(5, kHeads, kKvHeads, kWidth);
  FakeSequence sequence(
      {.spec = FindPolicy(AllPolicies(), "laprox"),
       .params = {{"window", kWindow}, {"kernel", int64_t{1}}, {"slack", int64_t{7}}},
       .shape = {.num_layers = kLayers, .num_heads = kHeads, .num_kv_heads = kKvHeads},
       .protection = {.recent = kWindow},
       .prompt_tokens = 10,
       .budget = 24},
      world);
  sequence.Prefill(10);
  const auto& policy = dynamic_cast<const ScoredPolicy&>(sequence.policy());
  int rounds = 0;
  bool unequal = false;  // lanes hold different numbers of tokens
  while (rounds < 6) {
    sequence.Decode();
    if (!sequence.OverBudget()) continue;
    ++rounds;
    const std::vector<at::Tensor> scores = policy.ScoreAll(sequence.task());
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      std::vector<at::Tensor> expected;
      double sum = 0;
      for (int64_t head = 0; head < kKvHeads; ++head) {
        expected.push_back(
            Definition(world, sequence.Kept(layer, head), sequence.newest(), layer, head));
        sum += expected[head].sum().item<double>();
      }
      for (int64_t head = 0; head < kKvHeads; ++head) {
        const at::Tensor& score = scores[layer * kKvHeads + head];
        const absl::Span<const int32_t> index = sequence.index(layer, head);
        const std::vector<int32_t> kept = sequence.Kept(layer, head);
        unequal |= kept.size() != sequence.Kept(0, 0).size();
        for (size_t slot = 0; slot < index.size(); ++slot) {
          const int64_t rank =
              std::lower_bound(kept.begin(), kept.end(), index[slot]) - kept.begin();
          if (rank >= expected[head].size(0)) continue;
          EXPECT_NEAR(score[slot].item<double>(), expected[head][rank].item<double>() / sum, 1e-5);
        }
      }
    }
    int64_t held = 0;
    sequence.Round();
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      for (int64_t head = 0; head < kKvHeads; ++head) held += sequence.Kept(layer, head).size();
    }
    EXPECT_EQ(held, 24 * kLayers * kKvHeads);  // the pool is spent exactly
  }
  EXPECT_TRUE(unequal);
}

}  // namespace laprox_test
}  // namespace epikv
