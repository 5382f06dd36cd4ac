#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "policies/epikv/flat_score.h"
#include "policies/registry.h"
#include "policies/scored_policy.h"
#include "tests/fixtures/fake_sequence.h"
#include "tests/fixtures/golden_world.h"

// Law 8: published policies against what their authors' code, or another's, did over many rounds.
// The data is made by golden/make_*.py, which leave no two scores nearer than 1e-5 (relative) at
// any cut: so what is dropped must be the same token for token.

namespace epikv {
namespace golden_policies_test {

using nlohmann::json;

json Runs(const std::string& policy) {
  std::ifstream file(std::string(EPIKV_SOURCE_DIR "/tests/golden/epikv_authors/") + policy +
                     ".json");
  return json::parse(file)["runs"];
}

// Plays a run; `after` is called after each decode token's round.
void Play(
    FakeSequence& sequence, const json& run,
    const std::function<void(int64_t token)>& after = [](int64_t) {}) {
  const int64_t prompt_tokens = run["prompt_tokens"];
  sequence.Prefill(prompt_tokens);
  int64_t num_rounds = 0, num_victims = 0;
  for (size_t step = 0; step < run["dropped"].size(); ++step) {
    sequence.Decode();
    const auto round = sequence.Round();
    const auto victims = round.empty() ? std::vector<int32_t>{} : round[0];
    ASSERT_EQ(victims, run["dropped"][step].get<std::vector<int32_t>>()) << "step " << step;
    num_rounds += !victims.empty();
    num_victims += victims.size();
    after(sequence.newest());
  }
  EXPECT_GE(num_rounds, 5);
  EXPECT_GE(num_victims, 50);
}

TEST(EpikvAuthors, FlatScores) {
  for (const json& run : Runs("epikv_flat")) {
    FlatScore score(run["window"], 1);
    for (size_t step = 0; step < run["scores"].size(); ++step) {
      EXPECT_NEAR(score.Push(run["step_a"][step], run["step_b"][step]), run["scores"][step], 1e-5);
    }
  }
}

TEST(EpikvAuthors, FlatDropsTheSameTokens) {
  for (const json& run : Runs("epikv_flat")) {
    SCOPED_TRACE(testing::Message()
                 << "prompt " << run["prompt_tokens"] << ", budget " << run["budget"]);
    const int64_t prompt_tokens = run["prompt_tokens"];
    FakeSequence::Options options;
    options.spec = FindPolicy(AllPolicies(), "epikv_flat");
    options.shape = {.num_layers = 32, .num_heads = 4, .num_kv_heads = 2};  // depths 10 and 21
    options.params = {{"window", run["window"].get<int64_t>()}};
    options.protection = {.prompt = prompt_tokens, .recent = run["recent"]};
    options.prompt_tokens = prompt_tokens;
    options.budget = run["budget"];
    FakeWorld world;
    world.residual_step = [&](int64_t layer, int64_t token) -> float {
      return run[layer == 10 ? "step_a" : "step_b"][token - prompt_tokens];
    };
    FakeSequence sequence(options, world);
    ASSERT_NO_FATAL_FAILURE(Play(sequence, run));
  }
}

// As in golden/make_epikv_authors.py.
uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

uint64_t Weight(uint64_t seed, uint64_t layer, uint64_t head, uint64_t query, uint64_t token) {
  const uint64_t worth = Mix(seed << 32 | token) % 100 + 1;
  const uint64_t luck = Mix(seed << 56 | layer << 48 | head << 40 | query << 20 | token) % 1000 + 1;
  return worth * luck;
}

// One query head's probabilities over `index`, added to `row`.
void AddRow(uint64_t seed, int64_t layer, int64_t head, int64_t query,
            absl::Span<const int32_t> index, std::vector<float>& row) {
  uint64_t sum = 0;
  for (int32_t token : index) sum += Weight(seed, layer, head, query, token);
  for (size_t slot = 0; slot < row.size(); ++slot) {
    const uint64_t weight = Weight(seed, layer, head, query, index[slot]);
    row[slot] += static_cast<float>(static_cast<double>(weight) / static_cast<double>(sum));
  }
}

TEST(EpikvAuthors, H2oDropsTheSameTokens) {
  for (const json& run : Runs("h2o")) {
    SCOPED_TRACE(testing::Message()
                 << "prompt " << run["prompt_tokens"] << ", budget " << run["budget"]);
    const int64_t group = 2, seed = run["seed"];
    FakeSequence::Options options;
    options.spec = FindPolicy(AllPolicies(), "h2o");
    options.shape = {.num_layers = run["layers"],
                     .num_heads = run["heads"],
                     .num_kv_heads = run["heads"].get<int64_t>() / group};
    options.params = {{"scope", std::string("model")}};
    options.protection = {.sinks = run["sinks"], .recent = run["recent"]};
    options.prompt_tokens = run["prompt_tokens"];
    options.budget = run["budget"];
    FakeWorld world;
    world.attention = [&](int64_t layer, int64_t head, int64_t query,
                          absl::Span<const int32_t> index) {
      std::vector<float> row(index.size());
      for (int64_t member = 0; member < group; ++member) {
        AddRow(seed, layer, head * group + member, query, index, row);
      }
      for (float& mass : row) mass /= group;
      return row;
    };
    FakeSequence sequence(options, world);
    size_t compared = 0;
    ASSERT_NO_FATAL_FAILURE(Play(sequence, run, [&](int64_t token) {
      const auto golden = run["mass"].find(std::to_string(token));
      if (golden == run["mass"].end()) return;
      ++compared;
      std::map<int32_t, float> mass;
      const absl::Span<const int32_t> index = sequence.index(0, 0);
      for (size_t slot = 0; slot < index.size(); ++slot) {
        mass[index[slot]] = sequence.column(0, 0, 0)[slot];
      }
      ASSERT_EQ(mass.size(), golden->size());
      for (const json& entry : *golden) {
        EXPECT_NEAR(mass.at(entry[0]), entry[1], 1e-5) << "token " << entry[0];
      }
    }));
    EXPECT_EQ(compared, run["mass"].size());
  }
}

// Of the published policy: four sinks, and depths 10 and 21 of 32 blocks.
TEST(EpikvAuthors, PublishedSettingsAreTheDefaults) {
  const ModelShape shape{.num_layers = 32};
  const PolicySpec& h2o = *FindPolicy(AllPolicies(), "h2o");
  const Params model = ResolveParams(h2o, {{"scope", std::string("model")}}, shape).params;
  EXPECT_EQ(h2o.traits(model, shape).published.sinks, 4);
  const PolicySpec& flat = *FindPolicy(AllPolicies(), "epikv_flat");
  EXPECT_EQ(flat.traits(ResolveParams(flat, {}, shape).params, shape).residual_layers,
            (std::vector<int64_t>{10, 21}));
}

// ---------------------------------------------------------------------------------------------
// The runs of golden/policies: every file is a policy's, made by the command it names.

std::vector<std::string> GoldenPolicies() {
  std::vector<std::string> names;
  for (const auto& entry :
       std::filesystem::directory_iterator(EPIKV_SOURCE_DIR "/tests/golden/policies")) {
    names.push_back(entry.path().stem());
  }
  std::sort(names.begin(), names.end());
  return names;
}

ParamValue ParamOf(const json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number()) return value.get<double>();
  if (value.is_string()) return value.get<std::string>();
  if (!value.empty() && value[0].is_string()) return value.get<std::vector<std::string>>();
  return value.get<std::vector<int64_t>>();
}

FakeSequence SequenceOf(const std::string& policy, const json& run) {
  FakeSequence::Options options;
  options.spec = FindPolicy(AllPolicies(), policy);
  const json& shape = run["shape"];
  options.shape = {.num_layers = shape["layers"],
                   .num_heads = shape["heads"],
                   .num_kv_heads = shape["kv_heads"],
                   .key_width = shape["width"],
                   .value_width = shape["width"],
                   .hidden_size = 2 * shape["width"].get<int64_t>(),
                   .final_norm = true};
  const int64_t width = shape["width"];
  RopeShape rope;
  for (int64_t i = 0; i < width / 2; ++i) {
    rope.inv_freq.push_back(std::pow(10000.0, -2.0 * static_cast<double>(i) / width));
  }
  options.shape.ropes.assign(options.shape.num_layers, rope);
  if (run.contains("artefact")) {
    const std::string text = run["artefact"].dump();
    NamedArrays arrays;
    const json given = run.value("arrays", json::object());
    for (const auto& [name, array] : given.items()) {
      arrays[name] = {array["shape"], array["values"]};
    }
    auto data = options.spec->read_data({.json = text, .arrays = arrays}, options.shape);
    EXPECT_TRUE(data.ok()) << data.status();
    options.shape.artefacts[policy] = *std::move(data);
  }
  for (const auto& [name, value] : run["params"].items()) options.params[name] = ParamOf(value);
  options.protection = {.prompt = run["prompt"], .sinks = run["sinks"], .recent = run["recent"]};
  options.prompt_tokens = run["prompt_tokens"];
  options.budget = run["budget"];
  options.seed = run["seed"];
  return FakeSequence(options,
                      GoldenWorld(run["seed"], shape["heads"], shape["kv_heads"], shape["width"]));
}

// A lane's scores in birth order.
std::vector<float> InBirthOrder(const at::Tensor& scores, absl::Span<const int32_t> index) {
  std::map<int32_t, float> by_index;
  for (size_t slot = 0; slot < index.size(); ++slot) {
    by_index[index[slot]] = scores[static_cast<int64_t>(slot)].item<float>();
  }
  std::vector<float> in_order;
  for (const auto& [token, score] : by_index) in_order.push_back(score);
  return in_order;
}

void ExpectScores(FakeSequence& sequence, const json& round) {
  const auto& policy = dynamic_cast<const ScoredPolicy&>(sequence.policy());
  const std::vector<at::Tensor> scores = policy.ScoreAll(sequence.task());
  ASSERT_EQ(scores.size(), round["scores"].size());
  const int64_t heads = scores.size() / sequence.num_layers();  // 0: one decision for all layers
  for (size_t lane = 0; lane < scores.size(); ++lane) {
    if (!scores[lane].defined()) {
      EXPECT_TRUE(round["scores"][lane].empty()) << "lane " << lane << " is within its budget";
      continue;
    }
    const int64_t layer = heads == 0 ? 0 : static_cast<int64_t>(lane) / heads;
    const int64_t head = heads == 0 ? 0 : static_cast<int64_t>(lane) % heads;
    const std::vector<float> got = InBirthOrder(scores[lane], sequence.index(layer, head));
    const std::vector<float> expected = round["scores"][lane];
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) {
      // What a reference puts on tokens that it keeps anyway (a window) is its own affair.
      const std::vector<int32_t> kept = sequence.Kept(layer, head);
      if (sequence.protection().Covers(kept[i], sequence.newest())) continue;
      EXPECT_NEAR(got[i], expected[i], 1e-5 * std::max(1.0f, std::abs(expected[i])))
          << "lane " << lane << ", token " << kept[i];
    }
  }
}

class GoldenPolicy : public testing::TestWithParam<std::string> {};

TEST_P(GoldenPolicy, ScoresAndDropsAsItsReferenceDoes) {
  std::ifstream file(EPIKV_SOURCE_DIR "/tests/golden/policies/" + GetParam() + ".json");
  const json golden = json::parse(file);
  ASSERT_FALSE(golden["runs"].empty());
  for (const json& run : golden["runs"]) {
    SCOPED_TRACE(testing::Message() << run["params"] << ", seed " << run["seed"] << ", prompt "
                                    << run["prompt_tokens"]);
    FakeSequence sequence = SequenceOf(GetParam(), run);
    const int64_t prompt_tokens = run["prompt_tokens"];
    sequence.Prefill(prompt_tokens);
    int64_t victims = 0;
    for (const json& round : run["rounds"]) {
      while (sequence.newest() < round["newest"]) {
        ASSERT_FALSE(sequence.OverBudget()) << "a round after token " << sequence.newest();
        sequence.Decode();
      }
      SCOPED_TRACE(testing::Message() << "after token " << sequence.newest());
      ASSERT_TRUE(sequence.OverBudget());
      if (round.contains("scores")) ExpectScores(sequence, round);
      const auto dropped = sequence.Round();
      ASSERT_EQ(dropped, round["dropped"].get<std::vector<std::vector<int32_t>>>());
      for (const auto& lane : dropped) victims += static_cast<int64_t>(lane.size());
    }
    EXPECT_GE(run["rounds"].size(), 5u);
    EXPECT_GE(victims, 50);
  }
}

INSTANTIATE_TEST_SUITE_P(Law8, GoldenPolicy, testing::ValuesIn(GoldenPolicies()),
                         [](const auto& info) { return info.param; });

}  // namespace golden_policies_test
}  // namespace epikv
