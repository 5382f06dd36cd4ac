#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "policies/registry.h"
#include "tests/fixtures/fake_sequence.h"
#include "tests/fixtures/golden_world.h"

// KVzip's scores against kvpress (golden/make_kvzip.py), KVzip+'s against their definition, and
// what is dropped.

namespace epikv {
namespace kvzip_test {

using nlohmann::json;

FakeSequence::Options Options(const std::string& policy, int64_t prompt, int64_t budget,
                              int64_t chunk) {
  FakeSequence::Options options;
  options.spec = FindPolicy(AllPolicies(), policy);
  options.params = {{"chunk", chunk}, {"slack", int64_t{7}}};
  options.shape = {.num_layers = 2,
                   .num_heads = 4,
                   .num_kv_heads = 2,
                   .key_width = 8,
                   .value_width = 8,
                   .hidden_size = 16,
                   .repeat = {.whole = {1, 2, 3}, .part = {4, 5}, .suffix = {6}}};
  options.prompt_tokens = prompt;
  options.budget = budget;
  return options;
}

// Of lanes, in birth order, which is that of the slots.
std::vector<std::vector<float>> ScoresOf(FakeSequence& sequence) {
  std::vector<std::vector<float>> scores;
  for (int64_t lane = 0; lane < 4; ++lane) {
    const absl::Span<const float> column = sequence.column(0, lane / 2, lane % 2);
    scores.emplace_back(column.begin(), column.end());
  }
  return scores;
}

TEST(Kvzip, ScoresAsKvpressDoesAndDropsTheLowestOfAll) {
  std::ifstream file(EPIKV_SOURCE_DIR "/tests/golden/kvzip.json");
  const json golden = json::parse(file);
  ASSERT_EQ(golden["runs"].size(), 3u);
  for (const json& run : golden["runs"]) {
    const int64_t prompt = run["prompt_tokens"], budget = prompt / 2;
    SCOPED_TRACE(testing::Message() << "prompt " << prompt << ", chunk " << run["chunk"]);
    FakeSequence sequence(Options("kvzip", prompt, budget, run["chunk"]),
                          GoldenWorld(run["seed"], 4, 2, 8));
    sequence.Prefill(prompt);
    const Eviction answer = sequence.Ask();
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    const std::vector<std::vector<float>> scores = ScoresOf(sequence);
    std::vector<std::tuple<float, int64_t, int32_t>> all;  // score, lane, token
    for (int64_t lane = 0; lane < 4; ++lane) {
      const std::vector<float> expected = run["scores"][lane];
      ASSERT_EQ(scores[lane].size(), expected.size());
      for (size_t token = 0; token < expected.size(); ++token) {
        EXPECT_NEAR(scores[lane][token], expected[token], 1e-5) << lane << ", " << token;
        all.emplace_back(scores[lane][token], lane, static_cast<int32_t>(token));
      }
    }
    std::sort(all.begin(), all.end());
    std::vector<std::vector<int32_t>> lowest(4);
    for (int64_t i = 0; i < 4 * (prompt - budget); ++i) {
      lowest[std::get<1>(all[i])].push_back(std::get<2>(all[i]));
    }
    for (int64_t lane = 0; lane < 4; ++lane) {
      EXPECT_THAT(answer.victims[lane], testing::UnorderedElementsAreArray(lowest[lane]));
    }
  }
}

// The most of a |v_i W_O[h]| / |x_t| over queries and heads.
TEST(KvzipPlus, IsItsDefinition) {
  constexpr int64_t kPrompt = 40, kChunk = 16;
  const FakeWorld world = GoldenWorld(54, 4, 2, 8);
  FakeSequence sequence(Options("kvzip_plus", kPrompt, 30, kChunk), world);
  sequence.Prefill(kPrompt);
  ASSERT_TRUE(sequence.Ask().status.ok());
  const std::vector<std::vector<float>> scores = ScoresOf(sequence);
  auto tensor = [](const std::vector<float>& row) { return at::tensor(row).to(at::kDouble); };
  for (int64_t lane = 0; lane < 4; ++lane) {
    const int64_t layer = lane / 2, head = lane % 2;
    for (int64_t segment = 0; segment * kChunk < kPrompt; ++segment) {
      const int64_t first = segment * kChunk, end = std::min(first + kChunk, kPrompt);
      const int64_t sinks = std::min<int64_t>(4, first), base = kPrompt + 1000 * (segment + 1);
      const int64_t size = (segment == 0 ? 3 : 2 + 8) + 1 + end - first;
      std::vector<double> most(end - first);
      for (int64_t t = 0; t < size; ++t) {
        std::vector<at::Tensor> keys;
        for (int64_t i = 0; i < sinks; ++i) keys.push_back(tensor(world.key(layer, head, i)));
        for (int64_t i = first; i < end; ++i) keys.push_back(tensor(world.key(layer, head, i)));
        for (int64_t i = 0; i <= t; ++i) keys.push_back(tensor(world.key(layer, head, base + i)));
        const at::Tensor stacked = at::stack(keys);
        const double length = tensor(world.attention_input(layer, base + t)).norm().item<double>();
        for (int64_t member = 0; member < 2; ++member) {
          const int64_t query_head = 2 * head + member;
          const at::Tensor attention =
              (at::mv(stacked, tensor(world.query(layer, query_head, base + t))) / std::sqrt(8.0))
                  .softmax(0);
          for (int64_t i = first; i < end; ++i) {
            at::Tensor added = at::zeros({16}, at::kDouble);
            const std::vector<float> value = world.value(layer, head, i);
            for (int64_t c = 0; c < 8; ++c) {
              added += tensor(world.output(layer, query_head, c)) * value[c];
            }
            const double given =
                attention[sinks + i - first].item<double>() * added.norm().item<double>() / length;
            most[i - first] = std::max(most[i - first], given);
          }
        }
      }
      for (int64_t i = first; i < end; ++i) {
        EXPECT_NEAR(scores[lane][i], most[i - first], 1e-4 * (1 + most[i - first]))
            << "lane " << lane << ", token " << i;
      }
    }
  }
}

TEST(Kvzip, AsksForTheWholeAndThenForPartsByTheirCues) {
  const FakeSequence::Options options = Options("kvzip", 40, 20, 16);
  const Params params = ResolveParams(*options.spec, options.params, options.shape).params;
  const auto policy = options.spec->make(params, options.shape);
  std::vector<int32_t> prompt;
  for (int32_t token = 100; token < 140; ++token) prompt.push_back(token);
  const std::vector<std::vector<int32_t>> segments = policy->PassSegments(prompt);
  ASSERT_EQ(segments.size(), 3u);
  EXPECT_THAT(segments[0], testing::ElementsAre(1, 2, 3, 6, 100, 101, 102, 103, 104, 105, 106, 107,
                                                108, 109, 110, 111, 112, 113, 114, 115));
  EXPECT_THAT(segments[2], testing::ElementsAre(4, 5, 124, 125, 126, 127, 128, 129, 130, 131, 6,
                                                132, 133, 134, 135, 136, 137, 138, 139));
}

TEST(Kvzip, DecodedTokensStayWhileOneOfThePromptMayGo) {
  FakeSequence sequence(Options("kvzip", 60, 30, 64), GoldenWorld(55, 4, 2, 8));
  sequence.Prefill(60);
  sequence.Round();
  int64_t rounds = 0;
  for (int64_t token = 0; token < 20; ++token) {
    sequence.Decode();
    for (const std::vector<int32_t>& victims : sequence.Round()) {
      ++rounds;
      for (const int32_t victim : victims) EXPECT_LT(victim, 60);
    }
  }
  EXPECT_GT(rounds, 0);
}

}  // namespace kvzip_test
}  // namespace epikv
