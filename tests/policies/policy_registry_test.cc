#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "policies/costs.h"
#include "policies/recipe.h"
#include "policies/registry.h"

// A policy is one file, one registry line, one scenario and one row in policies/README.md. This
// keeps files, registry and README in agreement; policy_scenarios_test.cc asks for the scenario.
// Run with EPIKV_REWRITE=1 it writes the README's table.

namespace epikv {
namespace policy_registry_test {

constexpr absl::string_view kBegin = "<!-- table: begin -->\n";
constexpr absl::string_view kEnd = "<!-- table: end -->";
constexpr char kReadme[] = EPIKV_SOURCE_DIR "/policies/README.md";

std::string ReadFile(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// The traits under the defaults, and under each value of each choice.
std::vector<PolicyTraits> TraitsOf(const PolicySpec& spec) {
  const ModelShape shape{.num_layers = 32, .num_heads = 32, .num_kv_heads = 8};
  std::vector<std::map<std::string, ParamValue>> variants = {{}};
  for (const ParamSpec& param : spec.params) {
    for (absl::string_view choice : param.choices) {
      const std::string item(choice);
      variants.push_back({{std::string(param.name), param.type == ParamType::kChoiceList
                                                        ? ParamValue(std::vector{item})
                                                        : ParamValue(item)}});
    }
  }
  std::vector<PolicyTraits> traits;
  for (const auto& given : variants) {
    traits.push_back(spec.traits(ResolveParams(spec, given, shape).params, shape));
  }
  return traits;
}

// The different values of one trait, joined by " or ".
template <typename Of>
std::string Distinct(const std::vector<PolicyTraits>& traits, const Of& of) {
  std::vector<std::string> values;
  for (const PolicyTraits& t : traits) {
    const std::string value(of(t));
    if (std::find(values.begin(), values.end(), value) == values.end()) values.push_back(value);
  }
  return absl::StrJoin(values, " or ");
}

std::string Show(const ParamValue& value) {
  if (const auto* b = std::get_if<bool>(&value)) return *b ? "true" : "false";
  if (const auto* i = std::get_if<int64_t>(&value)) return absl::StrCat(*i);
  if (const auto* d = std::get_if<double>(&value)) return absl::StrCat(*d);
  if (const auto* s = std::get_if<std::string>(&value)) return *s;
  if (const auto* l = std::get_if<std::vector<std::string>>(&value)) {
    return absl::StrCat("[", absl::StrJoin(*l, ", "), "]");
  }
  return absl::StrCat("[", absl::StrJoin(std::get<std::vector<int64_t>>(value), ", "), "]");
}

std::string Show(const ParamSpec& param) {
  return absl::StrCat("`", param.name, "` ",
                      param.choices.empty() ? std::string(ParamTypeName(param.type))
                                            : absl::StrJoin(param.choices, "\\|"),
                      param.fallback ? absl::StrCat(" = ", Show(*param.fallback)) : ", by model");
}

std::string Row(const PolicySpec& spec) {
  const std::vector<PolicyTraits> traits = TraitsOf(spec);
  const bool evicts = traits[0].evicts;
  const std::vector<std::string> cells = {
      absl::StrCat("`", spec.name, "`", spec.evaluation_only ? " (evaluation only)" : ""),
      std::string(spec.summary),
      Distinct(traits, [](const auto& t) { return absl::StrJoin(t.signals.Names(), ", "); }),
      evicts ? Distinct(traits, [](const auto& t) { return GranularityName(t.granularity); }) : "",
      evicts ? Distinct(traits, [](const auto& t) { return PromptEvictionName(t.prompt); }) : "",
      absl::StrJoin(spec.params, ", ",
                    [](std::string* out, const ParamSpec& p) { absl::StrAppend(out, Show(p)); }),
      std::string(spec.paper),
      std::string(spec.evidence),
  };
  return absl::StrCat("| ", absl::StrJoin(cells, " | "), " |\n");
}

std::string Table() {
  std::string table =
      "| name | idea | signals | shares a decision | prompt over budget | parameters | paper | "
      "evidence |\n"
      "|---|---|---|---|---|---|---|---|\n";
  for (const PolicySpec* spec : AllPolicies()) table += Row(*spec);
  return table;
}

TEST(PolicyRegistry, IsSortedAndUnique) {
  std::vector<absl::string_view> names;
  for (const PolicySpec* spec : AllPolicies()) names.push_back(spec->name);
  EXPECT_TRUE(std::is_sorted(names.begin(), names.end()));
  EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
}

// <family>/<name>.cc, or without the family where the policy's name begins with it.
TEST(PolicyRegistry, EveryFileIsOnePolicy) {
  std::multiset<std::string> files;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(EPIKV_SOURCE_DIR "/policies")) {
    const std::filesystem::path path = entry.path();
    const std::string family = path.parent_path().filename();
    if (family == "policies" || path.extension() != ".cc") continue;
    const std::string name = path.stem();
    if (family == "decorators") {
      EXPECT_NE(FindDecorator(name), nullptr) << path << " is no decorator";
      continue;
    }
    const std::string full_name = absl::StrCat(family, "_", name);
    files.insert(FindPolicy(AllPolicies(), full_name) != nullptr ? full_name : name);
  }
  std::multiset<std::string> registered;
  for (const PolicySpec* spec : AllPolicies()) registered.insert(std::string(spec->name));
  EXPECT_EQ(files, registered);
}

// The code that a policy's golden runs were made with, in order of first use; empty: it has none.
std::string References(const PolicySpec& spec) {
  const std::string name(spec.name);
  const std::string path = absl::StrCat(EPIKV_SOURCE_DIR "/tests/golden/policies/", name, ".json");
  if (!std::filesystem::exists(path)) return "";
  const nlohmann::json golden = nlohmann::json::parse(ReadFile(path));
  std::vector<std::string> references;
  for (const auto& run : golden["runs"]) {
    const std::string reference = run["reference"];
    if (std::find(references.begin(), references.end(), reference) == references.end()) {
      references.push_back(reference);
    }
  }
  return absl::StrJoin(references, ", ");
}

// A row without evidence is a claim.
TEST(PolicyRegistry, EveryPolicyNamesItsEvidence) {
  for (const PolicySpec* spec : AllPolicies()) {
    SCOPED_TRACE(spec->name);
    const std::string evidence(spec->evidence);
    const std::string references = References(*spec);
    if (!references.empty()) {
      EXPECT_THAT(evidence, testing::StartsWith("golden: " + references));
      continue;
    }
    const std::string name(spec->name);
    if (absl::StartsWith(evidence, "golden: ")) {
      const std::string file = absl::StrCat("/tests/golden/epikv_authors/", name, ".json");
      EXPECT_TRUE(std::filesystem::exists(EPIKV_SOURCE_DIR + file)) << file;
      continue;
    }
    ASSERT_THAT(evidence, testing::StartsWith("cases: "));
    const std::vector<std::string> words = absl::StrSplit(evidence, absl::ByAnyChar(" ,"));
    std::string file;
    for (const char* folder : {"", "policies/", "laws/"}) {
      const std::string place = absl::StrCat(EPIKV_SOURCE_DIR "/tests/", folder, words[1]);
      if (std::filesystem::exists(place)) file = place;
    }
    ASSERT_FALSE(file.empty()) << words[1];
    EXPECT_THAT(ReadFile(file), testing::HasSubstr(name));
  }
}

TEST(PolicyRegistry, ReadmeShowsTheTable) {
  const std::string readme = ReadFile(kReadme);
  const size_t begin = readme.find(std::string(kBegin)) + kBegin.size();
  const size_t end = readme.find(std::string(kEnd));
  ASSERT_NE(end, std::string::npos);
  ASSERT_LE(begin, end);
  const std::string shown = readme.substr(begin, end - begin);
  if (std::getenv("EPIKV_REWRITE") != nullptr) {
    std::ofstream(kReadme) << readme.substr(0, begin) << Table() << readme.substr(end);
    return;
  }
  EXPECT_EQ(shown, Table()) << "policies/README.md is out of date; rewrite its table with\n"
                               "  EPIKV_REWRITE=1 build/dev/tests/policies_test "
                               "--gtest_filter='PolicyRegistry.*'";
}

// Admission refuses a round that costs too much, and names the parameter that makes it so.
TEST(PolicyRegistry, WhatMakesARoundCostlyIsAParameter) {
  std::set<absl::string_view> all_pairs, some_pairs;
  for (const PolicySpec* spec : AllPolicies()) {
    const auto has = [&](absl::string_view name) {
      return std::any_of(spec->params.begin(), spec->params.end(),
                         [&](const ParamSpec& param) { return param.name == name; });
    };
    for (const PolicyTraits& traits : TraitsOf(*spec)) {
      if (traits.compares_all_pairs) {
        EXPECT_TRUE(has("redundancy")) << spec->name;
        EXPECT_EQ(traits.pool, Pool::kLane) << spec->name;  // or a lane may hold more
        all_pairs.insert(spec->name);
      }
      if (traits.pairs_per_token > 0 && !has("decorate")) some_pairs.insert(spec->name);
      if (traits.floats_per_token > 0) {
        EXPECT_TRUE(has("window") || has("pseudo_tokens")) << spec->name;
      }
      // It keeps logits of its queries.
      if (traits.window > 1 && spec->name != "scissorhands") {
        EXPECT_GE(traits.floats_per_token, 5 * traits.window) << spec->name;
      }
    }
  }
  EXPECT_THAT(all_pairs, testing::ElementsAre("rkv", "skipkv"));
  EXPECT_THAT(some_pairs, testing::ElementsAre("thinkv_tbe"));
}

// `epikv bench policies --write` has measured each, and shows what it found.
TEST(PolicyRegistry, EveryPolicysCostIsMeasured) {
  const std::string readme = ReadFile(kReadme);
  const size_t begin = readme.find("<!-- costs: begin -->"),
               end = readme.find("<!-- costs: end -->");
  ASSERT_LT(begin, end);
  const std::string table = readme.substr(begin, end - begin);
  EXPECT_FALSE(CostsMadeWith().empty());
  const std::vector<std::string> rows = absl::StrSplit(table, "\n| `");  // behind what is above
  // Without what the others are measured against, and what `epikv bench reading` measures.
  EXPECT_EQ(rows.size(), AllPolicies().size() - 1) << "a row of a policy that is gone";
  for (const PolicySpec* spec : AllPolicies()) {
    if (spec->name == "full" || spec->name == "quest") continue;
    EXPECT_NE(FindCost(spec->name), nullptr) << spec->name;
    EXPECT_THAT(table, testing::HasSubstr(absl::StrCat("| `", spec->name, "` |")));
  }
}

// One sentence each, which says where it deviates; none of a policy that is gone.
TEST(PolicyRegistry, ReadmeDescribesEveryPolicy) {
  const std::string readme = ReadFile(kReadme);
  constexpr absl::string_view kTitle = "\n## What each one does, and where it deviates";
  const size_t begin = readme.find(std::string(kTitle));
  ASSERT_NE(begin, std::string::npos);
  const std::string section = readme.substr(begin, readme.find("\n## ", begin + 1) - begin);
  std::vector<std::string> described, names;
  for (absl::string_view line : absl::StrSplit(section, '\n')) {
    if (!absl::ConsumePrefix(&line, "- **")) continue;
    const std::pair<std::string, std::string> item =
        absl::StrSplit(line, absl::MaxSplits("**: ", 1));
    described.push_back(item.first);
    EXPECT_GE(item.second.size(), 20u) << item.first;
  }
  for (const PolicySpec* spec : AllPolicies()) names.emplace_back(spec->name);
  EXPECT_THAT(described, testing::UnorderedElementsAreArray(names));
}

TEST(Recipe, RefusesWhatSaysNothing) {
  auto refusal = [](const std::map<std::string, ParamValue>& params) -> std::string {
    const ModelShape shape{.num_layers = 2, .num_heads = 4, .num_kv_heads = 2};
    const ResolvedParams resolved =
        ResolveParams(*FindPolicy(AllPolicies(), "snapkv"), params, shape);
    return resolved.violations.empty() ? "" : resolved.violations[0].description;
  };
  EXPECT_EQ(refusal({{"select", std::string("threshold")}, {"threshold", 0.1}}), "");
  EXPECT_THAT(refusal({{"threshold", 0.1}}), testing::HasSubstr("select = threshold"));
  EXPECT_THAT(refusal({{"select", std::string("sample")}, {"threshold", 0.1}}),
              testing::HasSubstr("select = threshold"));
}

}  // namespace policy_registry_test
}  // namespace epikv
