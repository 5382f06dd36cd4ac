#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "policies/registry.h"
#include "policies/scored_policy.h"
#include "tests/fixtures/fake_sequence.h"
#include "tests/fixtures/golden_world.h"

// InfoKV (arXiv 2606.26875) has no public code: its score against the definition, spelt out.

namespace epikv {
namespace infokv_test {

constexpr int64_t kHeads = 4, kKvHeads = 2, kGroup = 2, kWidth = 8, kWindow = 6;
constexpr double kShare = 0.7, kTau = 0.5;

// Mean over the window and the group of the softmax over all cached tokens. In birth order, the
// window's tokens left out.
std::vector<double> Attention(const FakeWorld& world, const std::vector<int32_t>& kept,
                              int64_t newest, int64_t layer, int64_t head) {
  std::vector<double> mean(kept.size() - kWindow);
  for (int64_t member = 0; member < kGroup; ++member) {
    for (int64_t query = newest - kWindow + 1; query <= newest; ++query) {
      const std::vector<float> q = world.query(layer, head * kGroup + member, query);
      std::vector<double> mass;
      double sum = 0;
      for (int32_t token : kept) {
        if (token > query) continue;
        const std::vector<float> k = world.key(layer, head, token);
        double logit = 0;
        for (int64_t c = 0; c < kWidth; ++c) logit += static_cast<double>(q[c]) * k[c];
        mass.push_back(std::exp(logit * world.attention_scale));
        sum += mass.back();
      }
      for (size_t i = 0; i < mean.size(); ++i) mean[i] += mass[i] / sum / (kGroup * kWindow);
    }
  }
  return mean;
}

void Normalise(std::vector<double>& x) {
  double sum = 0;
  for (double value : x) sum += value;
  for (double& value : x) value /= sum;
}

// surprise: entropy of every seventeenth token beside that of all, so that the window often holds a
// token that surprised far more than any that may go.
void ExpectTheDefinition(double surprise) {
  FakeWorld world = GoldenWorld(5, kHeads, kKvHeads, kWidth);
  const FakeWorld random = RandomWorld(6, 1 << 20);
  world.logit_entropy = [&](int64_t token) {
    return 3 * random.logit_entropy(token) + static_cast<float>(token % 17 == 0 ? surprise : 0);
  };
  world.residual_distance = random.residual_distance;
  FakeSequence sequence({.spec = FindPolicy(AllPolicies(), "infokv"),
                         .params = {{"window", kWindow},
                                    {"kernel", int64_t{1}},
                                    {"attention_share", kShare},
                                    {"tau", kTau},
                                    {"slack", int64_t{7}}},
                         .shape = {.num_layers = 2, .num_heads = kHeads, .num_kv_heads = kKvHeads},
                         .protection = {.recent = kWindow},
                         .prompt_tokens = 10,
                         .budget = 24},
                        world);
  sequence.Prefill(10);
  const auto& policy = dynamic_cast<const ScoredPolicy&>(sequence.policy());
  for (int rounds = 0; rounds < 6;) {
    sequence.Decode();
    if (!sequence.OverBudget()) continue;
    ++rounds;
    const std::vector<at::Tensor> scores = policy.ScoreAll(sequence.task());
    for (int64_t layer = 0; layer < 2; ++layer) {
      for (int64_t head = 0; head < kKvHeads; ++head) {
        const std::vector<int32_t> kept = sequence.Kept(layer, head);
        std::vector<double> attention = Attention(world, kept, sequence.newest(), layer, head);
        std::vector<double> information;
        for (size_t i = 0; i < attention.size(); ++i) {
          information.push_back(std::exp((world.residual_distance(layer, kept[i]) + kTau) *
                                         world.logit_entropy(kept[i])));
        }
        Normalise(attention);
        Normalise(information);
        const absl::Span<const int32_t> index = sequence.index(layer, head);
        for (size_t slot = 0; slot < index.size(); ++slot) {
          const size_t rank =
              std::lower_bound(kept.begin(), kept.end(), index[slot]) - kept.begin();
          if (rank >= attention.size()) continue;
          EXPECT_NEAR(scores[layer * kKvHeads + head][static_cast<int64_t>(slot)].item<double>(),
                      kShare * attention[rank] + (1 - kShare) * information[rank], 1e-5);
        }
      }
    }
    sequence.Round();
  }
}

TEST(InfoKv, ScoreIsTheDefinition) { ExpectTheDefinition(0); }
TEST(InfoKv, WhatSurprisesInTheWindowIsNoScale) { ExpectTheDefinition(200); }

}  // namespace infokv_test
}  // namespace epikv
