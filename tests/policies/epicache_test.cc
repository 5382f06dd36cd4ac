#include "policies/attention/epicache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "policies/registry.h"
#include "tests/fixtures/fake_sequence.h"
#include "tests/fixtures/golden_world.h"

// EpiCache's scores, evictions and layers' budgets against its authors' code
// (golden/make_epicache.py).

namespace epikv {
namespace epicache_test {

using nlohmann::json;

const json& Golden() {
  static const auto& golden =
      *new json(json::parse(std::ifstream(EPIKV_SOURCE_DIR "/tests/golden/epicache.json")));
  return golden;
}

// A row of a flat array [layers, heads, tokens, width].
std::vector<float> Row(const json& flat, int64_t place, int64_t width) {
  std::vector<float> row;
  for (int64_t c = 0; c < width; ++c) row.push_back(flat[place * width + c]);
  return row;
}

// A sequence whose keys and scratch queries are a run's.
FakeSequence SequenceOf(const json& run) {
  const int64_t layers = Golden()["layers"], heads = Golden()["heads"];
  const int64_t kv_heads = Golden()["kv_heads"], width = Golden()["width"];
  const int64_t tokens = run["tokens"], scratch = run["scratch"];
  FakeSequence::Options options;
  options.spec = FindPolicy(AllPolicies(), "epicache");
  std::vector<int64_t> query(scratch, 3), similarities;
  for (const double s : run["similarities"]) similarities.push_back(std::llround(1000 * s));
  const bool pair = run["level"] == "pair";
  options.params = {{"query", query},
                    {"similarities", similarities},
                    {"power", run["power"].get<double>()},
                    {"allocator", std::string(pair ? "head_pool" : "uniform")}};
  options.shape = {.vocab_size = 10,
                   .num_layers = layers,
                   .num_heads = heads,
                   .num_kv_heads = kv_heads,
                   .key_width = width,
                   .value_width = width,
                   .hidden_size = heads * width};
  options.prompt_tokens = tokens;
  options.budget = run["budget"];
  FakeWorld world = GoldenWorld(1, heads, kv_heads, width);
  world.attention_scale = 1 / std::sqrt(static_cast<double>(width));
  world.key = [=, keys = run["keys"]](int64_t layer, int64_t head, int64_t token) {
    if (token >= tokens) return std::vector<float>(width);  // of the scratch pass: nobody's
    return Row(keys, (layer * kv_heads + head) * tokens + token, width);
  };
  world.query = [=, queries = run["queries"]](int64_t layer, int64_t head, int64_t token) {
    return Row(queries, (layer * heads + head) * scratch + (token - tokens) % 1000, width);
  };
  return FakeSequence(options, std::move(world));
}

TEST(EpiCache, CachesBlocksAsItsAuthorsDo) {
  ASSERT_EQ(Golden()["prefills"].size(), 8u);
  for (const json& run : Golden()["prefills"]) {
    if (run["power"] != 0.0) continue;  // their sums are more than the budget
    FakeSequence sequence = SequenceOf(run);
    const int64_t tokens = run["tokens"], block = run["block"];
    SCOPED_TRACE(testing::Message() << "tokens " << tokens << ", block " << block);
    int64_t cached = 0;
    for (const json& step : run["steps"]) {
      const int64_t count = std::min(block, tokens - cached);
      sequence.Prefill(count);
      cached += count;
      if (!sequence.OverBudget()) continue;  // then nothing is read, or dropped
      const Eviction eviction = sequence.Ask();
      ASSERT_TRUE(eviction.status.ok()) << eviction.status;
      for (int64_t lane = 0; lane < 4; ++lane) {
        const int64_t layer = lane / 2, head = lane % 2;
        const absl::Span<const int32_t> index = sequence.index(layer, head);
        const absl::Span<const float> score = sequence.column(0, layer, head);
        const json& held = step["tokens"][layer][head];
        ASSERT_EQ(index.size(), held.size());
        for (size_t slot = 0; slot < index.size(); ++slot) {
          const auto at = std::find(held.begin(), held.end(), index[slot]) - held.begin();
          const float expected = step["scores"][layer][head][at];
          EXPECT_NEAR(score[slot], expected, 1e-5 * (1 + expected)) << lane << ", " << index[slot];
        }
      }
      sequence.Drop(eviction);
      for (int64_t lane = 0; lane < 4; ++lane) {
        const std::vector<int32_t> kept = step["kept"][lane / 2][lane % 2];
        EXPECT_THAT(sequence.Kept(lane / 2, lane % 2), testing::UnorderedElementsAreArray(kept));
      }
    }
  }
}

TEST(EpiCache, SharesOutTheBudgetAsItsAuthorsDoButForTheSum) {
  ASSERT_EQ(Golden()["budgets"].size(), 8u);
  for (const json& run : Golden()["budgets"]) {
    const std::vector<double> similarities = run["similarities"];
    const std::vector<int64_t> expected = run["budgets"];
    const int64_t budget = run["budget"], layers = std::ssize(similarities);
    EXPECT_EQ(PublishedEpicacheBudgets(similarities, run["power"], budget), expected);
    const std::vector<int64_t> ours = EpicacheBudgets(similarities, run["power"], budget);
    EXPECT_EQ(std::reduce(ours.begin(), ours.end()), budget * layers);
    for (int64_t layer = 0; layer < layers; ++layer) {
      EXPECT_GE(ours[layer], budget / 4);
      for (int64_t other = 0; other < layers; ++other) {
        if (expected[layer] > expected[other]) {
          EXPECT_GE(ours[layer], ours[other]);
        }
      }
    }
  }
}

TEST(EpiCache, SaysWhatIsWrongWithItsParameters) {
  const PolicySpec& spec = *FindPolicy(AllPolicies(), "epicache");
  const ModelShape shape{.vocab_size = 10, .num_layers = 2, .num_heads = 4, .num_kv_heads = 2};
  auto wrong = [&](std::map<std::string, ParamValue> params) {
    const ResolvedParams resolved = ResolveParams(spec, params, shape);
    return resolved.violations.empty() ? "" : resolved.violations.front().description;
  };
  EXPECT_EQ(wrong({}), "");
  EXPECT_THAT(wrong({{"query", std::vector<int64_t>{4}}}), testing::HasSubstr("2 at least"));
  EXPECT_THAT(wrong({{"query", std::vector<int64_t>{4, -1}}}), testing::HasSubstr("between 0 and"));
  EXPECT_THAT(wrong({{"query", std::vector<int64_t>{4, 10}}}),
              testing::HasSubstr("outside the vocabulary"));
  EXPECT_THAT(wrong({{"similarities", std::vector<int64_t>{4}}}), testing::HasSubstr("2 layers"));
  EXPECT_THAT(wrong({{"similarities", std::vector<int64_t>{4, 1001}}}),
              testing::HasSubstr("between -1000 and 1000"));
}

// Without a query the prompt's newest tokens ask; a query asks anew behind each block.
TEST(EpiCache, AsksByThePromptsEndIfNothingElse) {
  const PolicySpec& spec = *FindPolicy(AllPolicies(), "epicache");
  const ModelShape shape{.vocab_size = 10, .num_layers = 2, .num_heads = 4, .num_kv_heads = 2};
  std::vector<int32_t> prompt(100);
  std::iota(prompt.begin(), prompt.end(), 0);
  const auto policy = spec.make(ResolveParams(spec, {}, shape).params, shape);
  const auto segments = policy->PassSegments(prompt);
  ASSERT_EQ(segments.size(), 1u);
  EXPECT_EQ(segments[0], std::vector<int32_t>(prompt.end() - 64, prompt.end()));
}

}  // namespace epicache_test
}  // namespace epikv
