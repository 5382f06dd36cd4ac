#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "policies/registry.h"
#include "policies/scored_policy.h"
#include "tests/fixtures/fake_sequence.h"
#include "tests/fixtures/golden_world.h"

// No public code could be had for obcache. What it claims to be is measured instead: how fast the
// outputs of the window's queries change as a token's key, value, or both, shrink.

namespace epikv {
namespace obcache_test {

constexpr int64_t kTokens = 20, kWindow = 3, kGroup = 2, kWidth = 8;

FakeSequence Sequence(const std::string& prune, const std::string& reduce = "after",
                      const FakeWorld& world = GoldenWorld(2, kGroup, 1, kWidth)) {
  FakeSequence sequence({.spec = FindPolicy(AllPolicies(), "obcache"),
                         .params = {{"prune", prune},
                                    {"reduce", reduce},
                                    {"window", kWindow},
                                    {"kernel", int64_t{1}}},
                         .shape = {.num_layers = 1,
                                   .num_heads = kGroup,
                                   .num_kv_heads = 1,
                                   .key_width = kWidth,
                                   .value_width = kWidth},
                         .prompt_tokens = kTokens,
                         .budget = kTokens - 1},
                        world);
  sequence.Prefill(kTokens);
  return sequence;
}

// Of each query, with token `i`'s key and value shrunk by a factor. [group, w, width]
at::Tensor Output(const FakeSequence& sequence, int64_t i, double key, double value) {
  at::Tensor keys = sequence.keys(0, 0).to(at::kDouble).clone();
  at::Tensor values = sequence.values(0, 0).to(at::kDouble).clone();
  keys[i] *= key;
  values[i] *= value;
  const at::Tensor queries = sequence.queries(0).to(at::kDouble).transpose(0, 1);
  at::Tensor logits = at::matmul(queries, keys.t()) * sequence.attention(0).scale;
  const AttentionFacts attention = sequence.attention(0);
  if (attention.soft_cap.has_value()) {
    logits = (logits / *attention.soft_cap).tanh() * *attention.soft_cap;
  }
  at::Tensor unseen =
      at::ones({kWindow, kTokens}, at::kBool).triu(kTokens - kWindow + 1);  // younger
  if (attention.window.has_value()) {
    unseen = unseen.logical_or(
        at::ones({kWindow, kTokens}, at::kBool).tril(kTokens - kWindow - *attention.window));
  }
  logits.masked_fill_(unseen, -1e300);
  return logits.softmax(-1).matmul(values);
}

// Sum over the group of the mean over the window of the squared speed.
double Measured(const FakeSequence& sequence, int64_t i, const std::string& prune) {
  constexpr double kStep = 1e-5;
  auto output = [&](double factor) {
    return Output(sequence, i, prune == "value" ? 1 : factor, prune == "key" ? 1 : factor);
  };
  const at::Tensor speed = (output(1 + kStep) - output(1 - kStep)) / (2 * kStep);
  return speed.square().sum(-1).mean(1).sum().item<double>();
}

class ObCacheIn : public ::testing::TestWithParam<FakeWorld> {};

TEST_P(ObCacheIn, IsTheMeasuredChangeOfTheOutputs) {
  for (const std::string prune : {"value", "key", "joint"}) {
    FakeSequence sequence = Sequence(prune, "after", GetParam());
    const auto& policy = dynamic_cast<const ScoredPolicy&>(sequence.policy());
    const at::Tensor score = policy.ScoreAll(sequence.task())[0];
    double most = 0;
    for (int64_t i = 0; i < kTokens - kWindow; ++i) {
      const double measured = Measured(sequence, i, prune);
      EXPECT_NEAR(score[i].item<double>(), measured, 1e-5 * std::max(1.0, measured))
          << prune << ", token " << i;
      most = std::max(most, measured);
    }
    EXPECT_GT(most, 0.1) << prune << " is no case";
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, ObCacheIn,
                         ::testing::Values(GoldenWorld(2, kGroup, 1, kWidth),
                                           BentWorld(2, kGroup, 1, kWidth, 2.0, 12)),
                         [](const auto& info) { return info.index == 0 ? "plain" : "bent"; });

// Of one head with the mean weights and logits: here by the published terms, one by one.
TEST(ObCache, ReducedBeforeIsThatOfTheMeanHead) {
  FakeSequence sequence = Sequence("joint", "before");
  const auto& policy = dynamic_cast<const ScoredPolicy&>(sequence.policy());
  const at::Tensor score = policy.ScoreAll(sequence.task())[0];
  const at::Tensor values = sequence.values(0, 0).to(at::kDouble);
  Lane lane(sequence, 0, 0);
  const at::Tensor weights = lane.window_attention().to(at::kDouble).mean(0);  // [w, n]
  const at::Tensor logits = lane.window_logits().to(at::kDouble).mean(0);
  const at::Tensor outputs = weights.matmul(values);
  for (int64_t i = 0; i < kTokens - kWindow; ++i) {
    double expected = 0;
    for (int64_t t = 0; t < kWindow; ++t) {
      const at::Tensor apart = values[i] - outputs[t];
      const double a = weights[t][i].item<double>(), z = logits[t][i].item<double>();
      expected += a * a * values[i].dot(values[i]).item<double>() / kWindow;
      expected += a * a * z * z * apart.dot(apart).item<double>() / kWindow;
      expected += 2 * a * a * z * values[i].dot(apart).item<double>() / kWindow;
    }
    EXPECT_NEAR(score[i].item<double>(), expected, 1e-5 * std::max(1.0, expected));
  }
}

// Shrunk all the way, a value takes with it just what is measured.
TEST(ObCache, ValueIsTheWholeChange) {
  FakeSequence sequence = Sequence("value");
  for (int64_t i = 0; i < kTokens - kWindow; ++i) {
    const at::Tensor change = Output(sequence, i, 1, 1) - Output(sequence, i, 1, 0);
    EXPECT_NEAR(change.square().sum(-1).mean(1).sum().item<double>(),
                Measured(sequence, i, "value"), 1e-6);
  }
}

// ---------------------------------------------------------------------------------------------
// accumulate = true, against the sum by its definition, over rounds.

FakeSequence Accumulating(const std::string& gqa, int64_t kernel) {
  return FakeSequence({.spec = FindPolicy(AllPolicies(), "obcache"),
                       .params = {{"accumulate", true},
                                  {"gqa", gqa},
                                  {"window", kWindow},
                                  {"kernel", kernel},
                                  {"slack", int64_t{0}}},
                       .shape = {.num_layers = 1,
                                 .num_heads = kGroup,
                                 .num_kv_heads = 1,
                                 .key_width = kWidth,
                                 .value_width = kWidth},
                       .protection = {.recent = 2},
                       .prompt_tokens = 12,
                       .budget = 14},
                      GoldenWorld(3, kGroup, 1, kWidth));
}

// Of the query of token `born`, by query head, to each token that it sees: A^2 Z^2 |v - o|^2.
std::map<int32_t, std::vector<double>> Saliency(const FakeSequence& sequence, int64_t born) {
  const at::Tensor keys = sequence.keys(0, 0).to(at::kDouble);
  const at::Tensor values = sequence.values(0, 0).to(at::kDouble);
  const at::Tensor queries = sequence.queries(0).to(at::kDouble);  // [w, heads, width]
  const absl::Span<const int32_t> index = sequence.index(0, 0);
  std::map<int32_t, std::vector<double>> saliency;
  for (int64_t head = 0; head < kGroup; ++head) {
    const at::Tensor query = queries[queries.size(0) - 1 - (sequence.newest() - born)][head];
    at::Tensor output = at::zeros(kWidth, at::kDouble);
    std::vector<double> logit(index.size());
    double sum = 0;
    for (size_t slot = 0; slot < index.size(); ++slot) {
      if (index[slot] > born) continue;
      logit[slot] = sequence.attention(0).scale * query.dot(keys[slot]).item<double>();
      sum += std::exp(logit[slot]);
      output += std::exp(logit[slot]) * values[slot];
    }
    output /= sum;
    for (size_t slot = 0; slot < index.size(); ++slot) {
      if (index[slot] > born) continue;
      const double moved = std::exp(logit[slot]) / sum * logit[slot];
      const at::Tensor apart = values[slot] - output;
      saliency[index[slot]].push_back(moved * moved * apart.dot(apart).item<double>());
    }
  }
  return saliency;
}

void Add(const std::map<int32_t, std::vector<double>>& saliency, const std::string& gqa,
         std::map<int32_t, double>& sum) {
  for (const auto& [token, heads] : saliency) {
    sum[token] += gqa == "max" ? std::max(heads[0], heads[1]) : heads[0] + heads[1];
  }
}

TEST(ObCache, AccumulatesOverThePromptsWindowAndEveryStep) {
  for (const int64_t kernel : {1, 3}) {
    FakeSequence sequence = Accumulating("sum", kernel);
    sequence.Prefill(12);
    std::map<int32_t, double> expected;  // of what is cached
    for (int64_t born = 12 - kWindow; born < 12; ++born) {
      Add(Saliency(sequence, born), "sum", expected);
    }
    int64_t rounds = 0;
    for (int64_t step = 0; step < 20; ++step) {
      sequence.Decode();
      Add(Saliency(sequence, sequence.newest()), "sum", expected);
      if (!sequence.OverBudget()) continue;
      const auto& policy = dynamic_cast<const ScoredPolicy&>(sequence.policy());
      const at::Tensor score = policy.ScoreAll(sequence.task())[0];
      const std::vector<int32_t> kept = sequence.Kept();
      for (size_t slot = 0; slot < kept.size(); ++slot) {
        const int64_t place =
            std::find(kept.begin(), kept.end(), sequence.index(0, 0)[slot]) - kept.begin();
        double most = 0;  // of the token's neighbours
        for (int64_t i = std::max<int64_t>(0, place - kernel / 2);
             i <= place + kernel / 2 && i < std::ssize(kept); ++i) {
          most = std::max(most, expected.at(kept[i]));
        }
        EXPECT_NEAR(score[slot].item<double>(), most, 1e-5 * std::max(1.0, most))
            << "token " << kept[place] << " after " << sequence.newest();
      }
      const auto dropped = sequence.Round();
      for (int32_t victim : dropped[0]) expected.erase(victim);
      ++rounds;
    }
    EXPECT_EQ(rounds, 18);
  }
}

// The largest of the group's, step by step: not the largest sum.
TEST(ObCache, AccumulatesWhatTheGroupMakesOfAStep) {
  FakeSequence sequence = Accumulating("max", 1);
  sequence.Prefill(12);
  std::map<int32_t, double> expected;
  for (int64_t born = 12 - kWindow; born < 12; ++born) {
    Add(Saliency(sequence, born), "max", expected);
  }
  for (size_t slot = 0; slot < 12; ++slot) {
    const double sum = expected.at(sequence.index(0, 0)[slot]);
    EXPECT_NEAR(sequence.column(0, 0, 0)[slot], sum, 1e-5 * std::max(1.0, sum));
  }
}

TEST(ObCache, AccumulatesThePromptHoweverItIsCutUp) {
  FakeSequence whole = Accumulating("sum", 1), cut = Accumulating("sum", 1);
  whole.Prefill(12);
  cut.Prefill(5);
  cut.Prefill(6);
  cut.Prefill(1);
  for (size_t slot = 0; slot < 12; ++slot) {
    EXPECT_EQ(whole.column(0, 0, 0)[slot], cut.column(0, 0, 0)[slot]);
  }
}

}  // namespace obcache_test
}  // namespace epikv
