#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "policies/lane.h"
#include "policies/registry.h"
#include "policies/scored_policy.h"
#include "tests/fixtures/fake_sequence.h"
#include "tests/fixtures/golden_world.h"

// Policies that make attention of queries and keys make that of the layer: under its soft cap and
// window. Against the definition, query by query, in fp64.

namespace epikv {
namespace bent_attention_test {

constexpr int64_t kHeads = 4, kKvHeads = 2, kGroup = 2, kWidth = 8;
constexpr int64_t kAsked = 6;   // the policies' window: queries
constexpr int64_t kShown = 14;  // the layers' window: tokens
constexpr double kCap = 0.8;

FakeWorld World() { return BentWorld(7, kHeads, kKvHeads, kWidth, kCap, kShown); }

FakeSequence Sequence(const std::string& policy, std::map<std::string, ParamValue> params,
                      const FakeWorld& world = World()) {
  params["slack"] = int64_t{0};
  FakeSequence sequence({.spec = FindPolicy(AllPolicies(), policy),
                         .params = std::move(params),
                         .shape = {.num_layers = 2,
                                   .num_heads = kHeads,
                                   .num_kv_heads = kKvHeads,
                                   .key_width = kWidth,
                                   .value_width = kWidth,
                                   .hidden_size = 2 * kWidth},
                         .protection = {.recent = 2},
                         .prompt_tokens = 20,
                         .budget = 24},
                        world);
  sequence.Prefill(20);
  for (int64_t step = 0; step < 12; ++step) {
    sequence.Round();
    sequence.Decode();
  }
  std::mt19937 random(1);
  sequence.Shuffle(random);
  return sequence;
}

// What the queries of tokens (newest - count, newest] give each slot, averaged over the group: row
// by row as FakeWorld has it. fp64 [count, used]
at::Tensor Given(const FakeSequence& sequence, int64_t layer, int64_t head, int64_t count) {
  const FakeWorld world = World();
  const absl::Span<const int32_t> index = sequence.index(layer, head);
  std::vector<at::Tensor> rows;
  for (int64_t query = sequence.newest() + 1 - count; query <= sequence.newest(); ++query) {
    std::vector<int32_t> tokens;
    for (int32_t token : index) {
      if (token <= query) tokens.push_back(token);
    }
    const std::vector<float> seen = world.attention(layer, head, query, tokens);
    std::vector<double> row;
    size_t next = 0;
    for (int32_t token : index) row.push_back(token <= query ? seen[next++] : 0);
    rows.push_back(at::tensor(row));
  }
  return at::stack(rows);
}

// The tokens that no query of the policy's window sees, by slot.
at::Tensor Hidden(const FakeSequence& sequence, int64_t layer, int64_t head) {
  const absl::Span<const int32_t> span = sequence.index(layer, head);
  const at::Tensor index = at::tensor(at::ArrayRef<int32_t>(span.data(), span.size()), at::kInt);
  return index <= sequence.newest() + 1 - kAsked - kShown;
}

TEST(BentAttention, OfTheWindowIsTheDefinition) {
  FakeSequence sequence = Sequence("snapkv", {{"window", kAsked}});
  int64_t hidden = 0;
  for (int64_t layer = 0; layer < 2; ++layer) {
    for (int64_t head = 0; head < kKvHeads; ++head) {
      Lane lane(sequence, layer, head);
      const at::Tensor attention = lane.window_attention().mean(0).to(at::kDouble);
      EXPECT_TRUE(at::allclose(attention, Given(sequence, layer, head, kAsked), 1e-5, 1e-6));
      hidden += Hidden(sequence, layer, head).sum().item<int64_t>();
    }
  }
  EXPECT_GT(hidden, 0) << "is no case";
}

// A query all of whose tokens have left, or are beyond the window, gives nothing.
TEST(BentAttention, OfAQueryThatSeesNothingIsNothing) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor logits =
      at::tensor({-inf, -inf, -inf, -inf, 0.f, 0.f, -inf, nan, 1.f, 0.f, -inf, nan})
          .reshape({4, 3});
  const at::Tensor weights = SoftmaxOfSeen(logits);
  EXPECT_TRUE(weights[0].equal(at::zeros(3)));
  EXPECT_TRUE(weights[1].equal(at::tensor({0.f, 0.5f, 0.5f})));
  EXPECT_TRUE(weights[2].isnan().all().item<bool>()) << "what is no number must stay none";
  EXPECT_TRUE(weights[3].isnan().all().item<bool>());
}

TEST(BentAttention, SnapKvRanksByIt) {
  FakeSequence sequence = Sequence("snapkv", {{"window", kAsked}, {"kernel", int64_t{1}}});
  const auto scores =
      dynamic_cast<const ScoredPolicy&>(sequence.policy()).ScoreAll(sequence.task());
  for (int64_t lane = 0; lane < 2 * kKvHeads; ++lane) {
    const int64_t layer = lane / kKvHeads, head = lane % kKvHeads;
    const at::Tensor expected = Given(sequence, layer, head, kAsked).mean(0);
    const absl::Span<const int32_t> index = sequence.index(layer, head);
    for (size_t slot = 0; slot < index.size(); ++slot) {
      if (index[slot] > sequence.newest() - kAsked) continue;  // the window's own
      EXPECT_NEAR(scores[lane][slot].item<double>(), expected[slot].item<double>(), 1e-6)
          << "token " << index[slot];
    }
  }
}

// The mean and covariance of the queries turned by each of the next positions in turn; the cap by
// its tangent; a token beyond the window of some of them counts by the others.
TEST(BentAttention, ExpectedAttentionIsTheDefinition) {
  constexpr int64_t kFuture = 20;
  FakeSequence sequence =
      Sequence("expected_attention", {{"future", kFuture}, {"value_norm", false}});
  const auto scores =
      dynamic_cast<const ScoredPolicy&>(sequence.policy()).ScoreAll(sequence.task());
  const std::vector<double> frequency = {1, 0.1};  // FakeSequence's
  at::Tensor rotation = at::zeros({kWidth, kWidth}, at::kDouble);
  for (int64_t i = 1; i <= kFuture; ++i) {
    at::Tensor turn = at::eye(kWidth, at::kDouble);
    for (int64_t pair = 0; pair < 2; ++pair) {
      const double angle = frequency[pair] * (sequence.newest() + i);
      turn[pair][pair] = turn[pair + 2][pair + 2] = std::cos(angle);
      turn[pair + 2][pair] = std::sin(angle);
      turn[pair][pair + 2] = -std::sin(angle);
    }
    rotation += turn / static_cast<double>(kFuture);
  }
  const double scale = sequence.attention(0).scale;
  bool part = false;
  for (int64_t lane = 0; lane < 2 * kKvHeads; ++lane) {
    const int64_t layer = lane / kKvHeads, head = lane % kKvHeads;
    const CacheView::QueryMoments moments = sequence.query_moments(layer);
    const at::Tensor keys = sequence.keys(layer, head).to(at::kDouble);
    const absl::Span<const int32_t> index = sequence.index(layer, head);
    std::vector<double> expected(index.size());
    for (int64_t member = 0; member < kGroup; ++member) {
      const at::Tensor mean = rotation.matmul(moments.mean[head * kGroup + member].to(at::kDouble));
      const at::Tensor covariance =
          rotation.matmul(moments.covariance[head * kGroup + member].to(at::kDouble))
              .matmul(rotation.t());
      std::vector<double> mass(index.size());
      double sum = 0;
      for (size_t slot = 0; slot < index.size(); ++slot) {
        if (index[slot] < CacheView::kFirstMeasuredQuery) continue;
        const at::Tensor key = keys[static_cast<int64_t>(slot)];
        const double z = scale * key.dot(mean).item<double>();
        const double spread = scale * scale * key.dot(covariance.matmul(key)).item<double>();
        const double tanh = std::tanh(z / kCap), slope = 1 - tanh * tanh;
        int64_t sees = 0;
        for (int64_t i = 1; i <= kFuture; ++i) {
          sees += index[slot] > sequence.newest() + i - kShown ? 1 : 0;
        }
        part = part || (sees > 0 && sees < kFuture);
        mass[slot] = std::exp(kCap * tanh + slope * slope * spread / 2) * sees / kFuture;
        sum += mass[slot];
      }
      for (size_t slot = 0; slot < index.size(); ++slot)
        expected[slot] += mass[slot] / sum / kGroup;
    }
    for (size_t slot = 0; slot < index.size(); ++slot) {
      if (index[slot] < CacheView::kFirstMeasuredQuery) continue;
      EXPECT_NEAR(scores[lane][static_cast<int64_t>(slot)].item<double>(), expected[slot], 1e-5)
          << "token " << index[slot];
    }
  }
  EXPECT_TRUE(part) << "is no case";
}

// What is hidden is worth least to every policy that goes by attention alone.
TEST(BentAttention, WhatIsHiddenGoesFirst) {
  const std::map<std::string, std::map<std::string, ParamValue>> cases = {
      {"snapkv", {{"window", kAsked}, {"kernel", int64_t{1}}}},
      {"laprox", {{"window", kAsked}, {"kernel", int64_t{1}}}},
      {"obcache", {{"window", kAsked}, {"kernel", int64_t{1}}}},
      {"scissorhands", {{"window", kAsked}, {"history", std::string("mass")}}},
      {"expected_attention", {{"future", kAsked}}},
      {"triattention", {}}};
  for (const auto& [policy, params] : cases) {
    SCOPED_TRACE(policy);
    FakeSequence sequence = Sequence(policy, params);
    const auto scores =
        dynamic_cast<const ScoredPolicy&>(sequence.policy()).ScoreAll(sequence.task());
    for (int64_t lane = 0; lane < 2 * kKvHeads; ++lane) {
      const int64_t layer = lane / kKvHeads, head = lane % kKvHeads;
      at::Tensor hidden = Hidden(sequence, layer, head);
      if (policy == "expected_attention") {  // it has sinks of its own
        const absl::Span<const int32_t> index = sequence.index(layer, head);
        for (size_t i = 0; i < index.size(); ++i) {
          if (index[i] < 4) hidden[static_cast<int64_t>(i)] = false;
        }
      }
      if (!hidden.any().item<bool>()) continue;
      EXPECT_EQ(scores[lane].masked_select(hidden).max().item<float>(),
                scores[lane].min().item<float>());
    }
  }
}

// A page none of whose tokens the newest query sees is not used, however well its keys would match.
TEST(BentAttention, HiddenPagesAreNotUsed) {
  constexpr int64_t kPage = 4;
  FakeSequence sequence({.spec = FindPolicy(AllPolicies(), "raas_page"),
                         .params = {{"page", kPage}},
                         .prompt_tokens = 4,
                         .budget = 36},
                        World());
  sequence.Prefill(4);
  int64_t hidden = 0;
  for (int64_t step = 0; step < 60; ++step) {
    sequence.Decode();
    const int64_t newest = sequence.newest();
    for (int64_t layer = 0; layer < sequence.num_layers(); ++layer) {
      for (int64_t head = 0; head < sequence.num_kv_heads(); ++head) {
        const absl::Span<const int32_t> index = sequence.index(layer, head);
        for (size_t slot = 0; slot < index.size(); ++slot) {
          if ((index[slot] / kPage + 1) * kPage - 1 > newest - kShown) continue;
          ++hidden;
          EXPECT_NE(sequence.column(0, layer, head)[slot], newest + 1) << "token " << index[slot];
        }
      }
    }
    sequence.Round();
  }
  EXPECT_GT(hidden, 100);
}

// Windows so narrow that whole windows of queries see nothing of what is ranked: no policy's scores
// become NaN, which would fail the round.
TEST(BentAttention, EveryPolicyGetsOnWithNarrowWindows) {
  for (const PolicySpec* spec : AllPolicies()) {
    SCOPED_TRACE(spec->name);
    if (spec->evaluation_only || spec->name == "full" || spec->name == "quest") continue;
    FakeWorld world = BentWorld(7, kHeads, kKvHeads, kWidth, kCap, 3);
    const FakeWorld random = RandomWorld(1, 1 << 20);
    world.logit_entropy = random.logit_entropy;
    world.residual_distance = random.residual_distance;
    world.residual = random.residual;
    world.attention_input = random.attention_input;
    world.final_hidden = random.final_hidden;
    world.token_id = random.token_id;
    std::map<std::string, ParamValue> params;
    for (const ParamSpec& param : spec->params) {
      if (param.name == "slack") params["slack"] = int64_t{0};
      if (param.name == "window" && spec->name.find("epikv") != 0) params["window"] = kAsked;
    }
    FakeSequence::Options options{.spec = spec,
                                  .params = params,
                                  .protection = {.recent = 2},
                                  .prompt_tokens = 10,
                                  .budget = 24};
    options.shape.key_width = options.shape.value_width = kWidth;
    FakeSequence sequence(options, world);
    sequence.Prefill(10);
    int64_t rounds = 0;
    for (int64_t step = 0; step < 40; ++step) {
      sequence.Decode();
      rounds += sequence.Round().empty() ? 0 : 1;
    }
    EXPECT_GT(rounds, 1);
  }
}

}  // namespace bent_attention_test
}  // namespace epikv
