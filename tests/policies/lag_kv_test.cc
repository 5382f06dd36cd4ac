#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "policies/registry.h"
#include "policies/scored_policy.h"
#include "tests/fixtures/fake_sequence.h"
#include "tests/fixtures/golden_world.h"

// The scores of lagkv, epikv_lag_kv and epikv_lag_kv_key against their definitions, made anew of
// all rows in double: on longer lanes than the goldens', of widths that fill no vector.

namespace epikv {
namespace lag_kv_test {

constexpr int64_t kLayers = 3, kHeads = 2, kWidth = 19, kChunk = 24;

FakeSequence Sequence(const std::string& name, int64_t prompt, int64_t budget,
                      std::map<std::string, ParamValue> params) {
  return FakeSequence({.spec = FindPolicy(AllPolicies(), name),
                       .params = std::move(params),
                       .shape = {.num_layers = kLayers,
                                 .num_heads = kHeads,
                                 .num_kv_heads = kHeads,
                                 .key_width = kWidth,
                                 .value_width = kWidth},
                       .prompt_tokens = prompt,
                       .budget = budget,
                       .fills_first = true},
                      GoldenWorld(3, kHeads, kHeads, kWidth));
}

at::Tensor Slots(const FakeSequence& sequence, int64_t layer, int64_t head) {
  const absl::Span<const int32_t> index = sequence.index(layer, head);
  return at::tensor(at::ArrayRef<int32_t>(index.data(), index.size()), at::kInt).argsort();
}

at::Tensor Scores(FakeSequence& sequence, int64_t lane) {
  return dynamic_cast<const ScoredPolicy&>(sequence.policy()).ScoreAll(sequence.task())[lane];
}

// Of all lanes' rows of one kind and head, in birth order. [n]
at::Tensor EpikvDeviation(const std::vector<at::Tensor>& layers) {
  const at::Tensor rows = at::stack(layers).to(at::kDouble).mean(0);
  std::vector<at::Tensor> chunks = rows.split(kChunk);
  for (int64_t i = std::ssize(chunks) - 1; i > 0; --i) {
    const at::Tensor low = chunks[i - 1].amin(0), high = chunks[i - 1].amax(0);
    chunks[i] = (chunks[i] - low) / (high - low + 1e-9);
  }
  return at::cat(chunks).std(-1);
}

at::Tensor EpikvScores(const FakeSequence& sequence, bool values) {
  const at::Tensor slots = Slots(sequence, 0, 0);
  at::Tensor score = at::zeros(slots.numel(), at::kDouble);
  for (int64_t head = 0; head < kHeads; ++head) {
    std::vector<at::Tensor> k, v;
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      k.push_back(sequence.keys(layer, head).index_select(0, slots));
      if (values) v.push_back(sequence.values(layer, head).index_select(0, slots));
    }
    score += EpikvDeviation(k);
    if (values) score += EpikvDeviation(v);
  }
  return at::empty_like(score).index_copy_(0, slots, score / kHeads);
}

class EpikvLagKv : public testing::TestWithParam<std::string> {};

// Through a prompt in chunks and rounds of one and of more victims, which are others than the
// policy's, from slots in any order, and in a copy that goes another way.
TEST_P(EpikvLagKv, MeansRememberedAreThoseOfTheTokensThatAreLeft) {
  constexpr int64_t kPrompt = 170, kBudget = 100;
  const bool values = GetParam() == "epikv_lag_kv";
  for (const int64_t slack : {0, 5}) {
    std::mt19937 random(1);
    FakeSequence original =
        Sequence(GetParam(), kPrompt, kBudget, {{"chunk", kChunk}, {"slack", slack}});
    auto round = [&](FakeSequence& sequence) {
      if (!sequence.OverBudget()) return;
      const at::Tensor score = Scores(sequence, 0).to(at::kDouble);
      EXPECT_TRUE(at::allclose(score, EpikvScores(sequence, values), 1e-5, 0))
          << "slack " << slack << ", token " << sequence.newest();
      const absl::Span<const int32_t> index = sequence.index(0, 0);
      std::vector<int32_t> victims(index.begin(), index.end());
      std::erase(victims, static_cast<int32_t>(sequence.newest()));
      std::shuffle(victims.begin(), victims.end(), random);
      victims.resize(sequence.excess(0, 0));
      sequence.Drop({.victims = {victims}});
      sequence.Shuffle(random);
    };
    for (int64_t chunk = 0; chunk < 2; ++chunk) {
      original.Prefill(kPrompt / 2);
      round(original);
    }
    FakeSequence copy(original);
    for (int64_t token = 0; token < 60; ++token) {
      for (FakeSequence* sequence : {&original, &copy}) {
        sequence->Decode();
        round(*sequence);
      }
    }
    EXPECT_NE(original.Kept(), copy.Kept());
  }
}

INSTANTIATE_TEST_SUITE_P(LagKv, EpikvLagKv, testing::Values("epikv_lag_kv", "epikv_lag_kv_key"),
                         [](const auto& info) { return info.param; });

// Of rows in birth order behind the first four. [(partitions - 1) x lag]
at::Tensor LagRelative(const at::Tensor& rows, int64_t lag) {
  const int64_t partitions = (rows.size(0) - 4) / lag;
  const at::Tensor x =
      rows.to(at::kDouble).narrow(0, 4, partitions * lag).reshape({partitions, lag, -1});
  const at::Tensor next = x.slice(0, 1), low = next.amin(1, true), high = next.amax(1, true);
  const at::Tensor scaled = ((x.slice(0, 0, -1) - low) / (high - low)).masked_fill(high == low, 0);
  return scaled.std(-1).softmax(-1).flatten();
}

// What is scaled by infinity is no number. The request ends and is told which token it was; the
// least of what would be wrong without a word.
TEST(LagKv, AnInfiniteKeyEndsItsRequest) {
  for (const char* name : {"epikv_lag_kv", "epikv_lag_kv_key", "lagkv"}) {
    FakeWorld world = GoldenWorld(3, kHeads, kHeads, kWidth);
    world.key = [key = world.key](int64_t layer, int64_t head, int64_t token) {
      std::vector<float> row = key(layer, head, token);
      if (token == 40) row[5] = std::numeric_limits<float>::infinity();
      return row;
    };
    FakeSequence sequence({.spec = FindPolicy(AllPolicies(), name),
                           .params = {{name[0] == 'l' ? "lag" : "chunk", kChunk}},
                           .shape = {.num_layers = kLayers,
                                     .num_heads = kHeads,
                                     .num_kv_heads = kHeads,
                                     .key_width = kWidth,
                                     .value_width = kWidth},
                           .prompt_tokens = 170,
                           .budget = 60},
                          world);
    sequence.Prefill(170);
    const absl::Status status = sequence.Ask().status;
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << name;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("token")) << name;
  }
}

// One channel is alike in all tokens, and no measure.
TEST(LagKv, ScoresAreThoseOfItsDefinition) {
  constexpr int64_t kPrompt = 200, kLag = 24;
  for (const bool cross_scoring : {false, true}) {
    FakeWorld world = GoldenWorld(3, kHeads, kHeads, kWidth);
    world.key = [key = world.key](int64_t layer, int64_t head, int64_t token) {
      std::vector<float> row = key(layer, head, token);
      row[5] = 0.7f;
      return row;
    };
    FakeSequence sequence({.spec = FindPolicy(AllPolicies(), "lagkv"),
                           .params = {{"lag", kLag}, {"cross_scoring", cross_scoring}},
                           .shape = {.num_layers = 1,
                                     .num_heads = kHeads,
                                     .num_kv_heads = kHeads,
                                     .key_width = kWidth,
                                     .value_width = kWidth},
                           .prompt_tokens = kPrompt,
                           .budget = kPrompt - 1},
                          world);
    sequence.Prefill(kPrompt);
    std::mt19937 random(1);
    sequence.Shuffle(random);
    for (int64_t head = 0; head < kHeads; ++head) {
      const at::Tensor slots = Slots(sequence, 0, head);
      const at::Tensor mean = (LagRelative(sequence.keys(0, head).index_select(0, slots), kLag) +
                               LagRelative(sequence.values(0, head).index_select(0, slots), kLag)) /
                              2;
      at::Tensor expected = at::ones(kPrompt, at::kDouble);
      expected.narrow(0, 4, mean.numel())
          .copy_(cross_scoring
                     ? mean
                     : mean.view({-1, kLag}).argsort(-1, false).argsort(-1, false).flatten() /
                           kLag);
      const at::Tensor score = Scores(sequence, head).index_select(0, slots).to(at::kDouble);
      EXPECT_TRUE(at::allclose(score, expected, 1e-5, 0)) << cross_scoring << ", head " << head;
    }
  }
}

}  // namespace lag_kv_test
}  // namespace epikv
