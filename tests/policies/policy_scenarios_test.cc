#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "nlohmann/json.hpp"
#include "policies/registry.h"
#include "tests/fixtures/fake_sequence.h"

// golden/scenarios.txt, which explains itself.

namespace epikv {
namespace policy_scenarios_test {

struct Scenario {
  int64_t line = 0;
  std::string policy;
  std::map<std::string, std::string> settings;           // name -> value
  std::map<std::string, std::vector<std::string>> rows;  // name -> one word a token
};

std::vector<std::string> Words(const std::string& line) {
  return absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
}

std::vector<Scenario> ReadScenarios() {
  std::ifstream file(EPIKV_SOURCE_DIR "/tests/golden/scenarios.txt");
  EXPECT_TRUE(file.good());
  std::vector<Scenario> scenarios;
  std::string text;
  bool inside = false;
  for (int64_t line = 1; std::getline(file, text); ++line) {
    const std::vector<std::string> words = Words(text);
    if (words.empty()) inside = false;
    if (words.empty() || words[0][0] == '#') continue;
    if (inside) {
      scenarios.back().rows[words[0]] = {words.begin() + 1, words.end()};
      continue;
    }
    inside = true;
    Scenario& scenario = scenarios.emplace_back();
    scenario.line = line;
    scenario.policy = words[0];
    for (size_t i = 1; i < words.size(); ++i) {
      const std::pair<std::string, std::string> setting = absl::StrSplit(words[i], '=');
      scenario.settings.insert(setting);
    }
  }
  return scenarios;
}

ParamValue ParseValue(ParamType type, const std::string& text) {
  if (type == ParamType::kBool) return text == "true";
  if (type == ParamType::kInt) return int64_t{std::stoll(text)};
  if (type == ParamType::kFloat) return std::stod(text);
  if (type == ParamType::kChoice) return text;
  if (type == ParamType::kChoiceList) {
    return std::vector<std::string>(absl::StrSplit(text, ',', absl::SkipEmpty()));
  }
  std::vector<int64_t> list;
  for (absl::string_view item : absl::StrSplit(text, ',')) {
    list.push_back(std::stoll(std::string(item)));
  }
  return list;
}

void AddNumbers(const nlohmann::json& rows, std::vector<float>& numbers) {
  if (!rows.is_array()) return numbers.push_back(rows);
  for (const nlohmann::json& row : rows) AddNumbers(row, numbers);
}

// Of JSON: lists of numbers, or of such lists, by name.
NamedArrays Arrays(const std::string& text) {
  NamedArrays arrays;
  const nlohmann::json all = nlohmann::json::parse(text);
  for (const auto& [name, rows] : all.items()) {
    NamedArray& array = arrays[name];
    for (const nlohmann::json* part = &rows; part->is_array(); part = &(*part)[0]) {
      array.shape.push_back(std::ssize(*part));
    }
    AddNumbers(rows, array.values);
  }
  return arrays;
}

FakeSequence::Options Options(const Scenario& scenario) {
  FakeSequence::Options options;
  options.shape = {.num_layers = 1,
                   .num_heads = 1,
                   .num_kv_heads = 1,
                   .key_width = 2,
                   .value_width = 2,
                   .hidden_size = 2,
                   .ropes = {{.inv_freq = {0}}},
                   .final_norm = true};
  options.spec = FindPolicy(AllPolicies(), scenario.policy);
  EXPECT_NE(options.spec, nullptr) << "no policy '" << scenario.policy << "'";
  if (options.spec == nullptr) return options;
  std::map<std::string, std::string> settings = scenario.settings;
  const auto artefact = settings.extract("artefact"), arrays = settings.extract("arrays");
  for (const ParamSpec& param : options.spec->params) {
    const auto given = settings.extract(std::string(param.name));
    if (given.empty()) continue;
    options.params[given.key()] = ParseValue(param.type, given.mapped());
  }
  const std::map<std::string, int64_t*> places = {
      {"budget", &options.budget},
      {"prefill", &options.prompt_tokens},
      {"prompt", &options.protection.prompt},
      {"sinks", &options.protection.sinks},
      {"recent", &options.protection.recent},
      {"layers", &options.shape.num_layers},
      {"heads", &options.shape.num_kv_heads},
  };  // of KV, with as many query heads
  for (const auto& [name, value] : settings) {
    if (name == "seed") {
      options.seed = std::stoull(value);
    } else if (places.contains(name)) {
      *places.at(name) = std::stoll(value);
    } else {
      ADD_FAILURE() << scenario.policy << " knows no setting '" << name << "'";
    }
  }
  options.shape.num_heads = options.shape.num_kv_heads;
  if (!artefact.empty()) {  // of the shape that the others make
    auto data = options.spec->read_data(
        {.json = artefact.mapped(),
         .arrays = arrays.empty() ? NamedArrays() : Arrays(arrays.mapped())},
        options.shape);
    EXPECT_TRUE(data.ok()) << data.status();
    if (data.ok()) options.shape.artefacts[scenario.policy] = *std::move(data);
  }
  return options;
}

// The number of `token` in row `name` of a lane; 0 if there is none.
float Number(const Scenario& scenario, const std::string& name, const std::string& lane,
             int64_t token) {
  auto row = scenario.rows.find(name + lane);
  if (row == scenario.rows.end()) row = scenario.rows.find(name);
  if (row == scenario.rows.end()) return 0;
  float number = 0;
  EXPECT_TRUE(row->second[token] == "-" || absl::SimpleAtof(row->second[token], &number))
      << row->second[token];
  return number;
}

// The query of a token of a scratch pass, the `place`-th behind the newest.
float QueryBeyond(const Scenario& scenario, int64_t place) {
  constexpr int64_t kSegment = 1000;  // FakeSequence::SegmentAt
  const std::string name = place < kSegment ? "ahead" : "repeat";
  const auto row = scenario.rows.find(name);
  if (row == scenario.rows.end() || place % kSegment >= std::ssize(row->second)) return 0;
  return Number(scenario, name, "", place % kSegment);
}

FakeWorld World(const Scenario& scenario, int64_t newest) {
  auto lane = [](int64_t layer, int64_t head) { return absl::StrCat("_", layer, "_", head); };
  FakeWorld world;
  world.residual_step = [&scenario](int64_t layer, int64_t token) {
    return Number(scenario, absl::StrCat("step_", layer), "", token);
  };
  auto row = [=, &scenario](const std::string& name) {
    return [=, &scenario](int64_t layer, int64_t head, int64_t token) {
      if (token <= newest) {
        return std::vector<float>{0, Number(scenario, name, lane(layer, head), token)};
      }
      const int64_t place = token - newest - 1;
      return std::vector<float>{0, name == "query" ? QueryBeyond(scenario, place) : 0};
    };
  };
  world.key = row("key");
  world.value = row("value");
  world.query = row("query");
  const auto rows = scenario.rows.lower_bound("attention");
  if (rows == scenario.rows.end() || !absl::StartsWith(rows->first, "attention")) {
    world.attention = AttentionOf(world, /*group=*/1);
  } else {
    world.attention = [=, &scenario](int64_t layer, int64_t head, int64_t query,
                                     absl::Span<const int32_t> index) {
      std::vector<float> row(index.size());
      for (size_t slot = 0; query == newest && slot < row.size(); ++slot) {
        row[slot] = Number(scenario, "attention", lane(layer, head), index[slot]);
      }
      return row;
    };
  }
  world.logit_entropy = [&scenario](int64_t token) {
    return Number(scenario, "entropy", "", token);
  };
  world.attention_input = [=, &scenario](int64_t layer, int64_t token) {
    if (token > newest) return std::vector<float>{1, 0};
    return std::vector<float>{1, Number(scenario, "input", absl::StrCat("_", layer), token)};
  };
  world.token_id = [&scenario](int64_t token) {
    return static_cast<int32_t>(Number(scenario, "token", "", token));
  };
  world.final_hidden = [&scenario](int64_t token) {
    return std::vector<float>{1, Number(scenario, "final", "", token)};
  };
  world.residual_distance = [&scenario](int64_t layer, int64_t token) {
    return Number(scenario, absl::StrCat("distance_", layer), "", token);
  };
  world.residual = [&scenario](int64_t layer, int64_t token) {
    return std::vector<float>{1, Number(scenario, absl::StrCat("residual_", layer), "", token)};
  };
  world.output = [](int64_t, int64_t, int64_t channel) {
    return std::vector<float>{channel == 0 ? 1.0f : 0.0f, channel == 1 ? 1.0f : 0.0f};
  };
  return world;
}

std::string Picture(const std::vector<int32_t>& kept, int64_t tokens) {
  const std::set<int32_t> set(kept.begin(), kept.end());
  std::vector<std::string> marks;
  for (int64_t token = 0; token < tokens; ++token) {
    marks.push_back(set.contains(static_cast<int32_t>(token)) ? "#" : ".");
  }
  return absl::StrJoin(marks, " ");
}

// All rows of a scenario in columns, then what was kept instead.
std::string Explain(const Scenario& scenario, const std::string& keep, const std::string& got) {
  std::vector<std::pair<std::string, std::vector<std::string>>> rows;
  for (const auto& row : scenario.rows) {
    if (!absl::StartsWith(row.first, "keep")) rows.push_back(row);
  }
  rows.push_back({keep, scenario.rows.at(keep)});
  rows.push_back({"got", Words(got)});
  std::string text;
  for (const auto& [name, words] : rows) {
    absl::StrAppend(&text, name, std::string(name.size() < 16 ? 16 - name.size() : 1, ' '));
    for (const std::string& word : words) {
      absl::StrAppend(&text, std::string(word.size() < 4 ? 4 - word.size() : 1, ' '), word);
    }
    absl::StrAppend(&text, "\n");
  }
  return text;
}

void Check(const Scenario& scenario) {
  SCOPED_TRACE(absl::StrCat("tests/golden/scenarios.txt:", scenario.line, ": ", scenario.policy,
                            " ", absl::StrJoin(scenario.settings, " ", absl::PairFormatter("="))));
  ASSERT_FALSE(scenario.rows.empty());
  const int64_t tokens = static_cast<int64_t>(scenario.rows.begin()->second.size());
  for (const auto& [name, words] : scenario.rows) {
    ASSERT_EQ(static_cast<int64_t>(words.size()), tokens) << name << " is of another length";
  }
  const FakeSequence::Options options = Options(scenario);
  if (options.spec == nullptr) return;
  FakeSequence sequence(options, World(scenario, tokens - 1));
  sequence.Prefill(options.prompt_tokens);
  while (sequence.newest() < tokens - 1) sequence.Decode();
  sequence.Round();

  int64_t pictures = 0;
  for (int64_t layer = 0; layer < sequence.num_layers(); ++layer) {
    for (int64_t head = 0; head < sequence.num_kv_heads(); ++head) {
      std::string keep = absl::StrCat("keep_", layer, "_", head);
      if (!scenario.rows.contains(keep)) keep = "keep";
      if (!scenario.rows.contains(keep)) continue;
      ++pictures;
      const std::string got = Picture(sequence.Kept(layer, head), tokens);
      EXPECT_EQ(absl::StrJoin(scenario.rows.at(keep), " "), got) << "\n"
                                                                 << Explain(scenario, keep, got);
    }
  }
  EXPECT_GT(pictures, 0) << "no picture";
}

TEST(PolicyScenarios, KeepWhatThePictureShows) {
  for (const Scenario& scenario : ReadScenarios()) Check(scenario);
}

TEST(PolicyScenarios, EveryPolicyHasOne) {
  std::set<std::string> shown;
  for (const Scenario& scenario : ReadScenarios()) shown.insert(scenario.policy);
  for (const PolicySpec* spec : AllPolicies()) {
    EXPECT_TRUE(shown.contains(std::string(spec->name)))
        << spec->name << " has no scenario in tests/golden/scenarios.txt";
  }
}

}  // namespace policy_scenarios_test
}  // namespace epikv
