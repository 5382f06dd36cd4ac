#include "tests/law_cases.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/probe_policy.h"
#include "tests/ragged_policy.h"

namespace epikv {

std::string ModelPath(const std::string& name) {
  return absl::StrCat(EPIKV_TEST_MODELS, "/", name, ".pt");
}

PolicyCatalog LawPolicies() {
  static const auto& all = *new std::vector<const PolicySpec*>([] {
    std::vector<const PolicySpec*> specs(AllPolicies().begin(), AllPolicies().end());
    specs.push_back(&kRaggedPolicy);
    specs.push_back(&kProbePolicy);
    std::sort(specs.begin(), specs.end(),
              [](const PolicySpec* a, const PolicySpec* b) { return a->name < b->name; });
    return specs;
  }());
  return all;
}

void PrintTo(const PolicyCase& c, std::ostream* out) { *out << c.label; }

std::string Camel(absl::string_view name) {
  std::string camel;
  for (absl::string_view word : absl::StrSplit(name, absl::ByAnyChar("_-"))) {
    if (word.empty()) continue;
    absl::StrAppend(&camel, std::string(1, absl::ascii_toupper(word[0])), word.substr(1));
  }
  return camel;
}

std::map<std::string, ParamValue> SmallParams(const PolicySpec& spec) {
  std::map<std::string, ParamValue> params;
  if (spec.name == "thinkv_tbe") {  // with what a calibration would say
    params = {{"layers", std::vector<int64_t>{0, 1}},
              {"theta1", 0.3},
              {"theta2", 0.6},
              {"segment", int64_t{16}},
              {"refresh", int64_t{16}},
              {"ladder", std::vector<int64_t>{14, 12, 10, 8, 6, 4}}};
  }
  for (const ParamSpec& param : spec.params) {
    if (param.name == "window" && param.fallback.has_value()) params["window"] = int64_t{16};
    if (param.name == "lag") params["lag"] = int64_t{8};
    if (param.name == "slack" && param.fallback != ParamValue(int64_t{0})) {
      params["slack"] = int64_t{7};
    }
    // Of the one segment that there is: so that a round ends at the budget, and the next is near.
    if (param.name == "retain_r") params["retain_r"] = int64_t{128};
    if (param.name == "prefer") {
      params["prefer"] = std::vector<int64_t>{3, 5, 50, 51, 52, 60, 61, 70, 90};
    }
  }
  return params;
}

std::vector<PolicyCase> EvictingPolicies() {
  std::vector<PolicyCase> cases;
  for (const PolicySpec* spec : LawPolicies()) {
    if (spec->name == "full") continue;
    cases.push_back({Camel(spec->name), std::string(spec->name), SmallParams(*spec)});
  }
  return cases;
}

std::vector<PolicyCase> PolicyVariants() {
  std::vector<PolicyCase> cases;
  for (const PolicySpec* spec : LawPolicies()) {
    auto add = [&](const ParamSpec& param, const std::string& label, const ParamValue& value) {
      if (param.fallback == value) return;
      PolicyCase c{Camel(spec->name) + label, std::string(spec->name), SmallParams(*spec)};
      c.params[std::string(param.name)] = value;
      const ModelShape shape{.num_layers = 4, .num_heads = 4, .num_kv_heads = 2};
      if (ResolveParams(*spec, c.params, shape).violations.empty()) cases.push_back(std::move(c));
    };
    for (const ParamSpec& param : spec->params) {
      if (param.type == ParamType::kBool) {
        for (bool value : {false, true})
          add(param, Camel(param.name) + (value ? "" : "Off"), value);
      }
      for (absl::string_view choice : param.choices) {
        const std::string item(choice);
        // Without a window's share its leanest lane would hold a twentieth of these small budgets.
        if (item == "pyramid" && !SmallParams(*spec).contains("window")) continue;
        const bool list = param.type == ParamType::kChoiceList;
        add(param, Camel(param.name) + Camel(item),
            list ? ParamValue(std::vector{item}) : ParamValue(item));
      }
      if (param.name == "slack") {
        const bool none = param.fallback == ParamValue(int64_t{0});
        add(param, none ? "Slack" : "EachStep", int64_t{none ? 6 : 0});
      }
      if (param.name == "reserve") add(param, "Reserve", int64_t{4});
      if (param.name == "temperature") add(param, "Temperature", 0.5);
    }
  }
  return cases;
}

const nlohmann::json& AuthorsRuns() {
  static const auto& golden = *new nlohmann::json([] {
    std::ifstream file(EPIKV_SOURCE_DIR "/tests/golden/epikv_authors/runs.json");
    return nlohmann::json::parse(file);
  }());
  return golden;
}

std::vector<int32_t> Text(const Manifest& manifest, int64_t count, uint64_t seed) {
  if (manifest.name == AuthorsRuns()["model"].get<std::string>()) {
    const auto& run = AuthorsRuns()["runs"][seed % AuthorsRuns()["runs"].size()];
    std::vector<int32_t> text = run["prompt"];
    const std::vector<int32_t> solution = run["tokens"];
    text.insert(text.end(), solution.begin(), solution.end());
    EXPECT_GE(static_cast<int64_t>(text.size()), count);
    text.resize(count);
    return text;
  }
  std::mt19937_64 rng(seed);
  std::vector<int32_t> text(manifest.vocab_size);
  std::iota(text.begin(), text.end(), 0);
  std::shuffle(text.begin(), text.end(), rng);
  EXPECT_GE(static_cast<int64_t>(text.size()), count);
  text.resize(count);
  return text;
}

RequestOptions Scoring(const Manifest& manifest, int64_t prompt, int64_t forced, uint64_t seed) {
  const std::vector<int32_t> text = Text(manifest, prompt + forced, seed);
  RequestOptions options;
  options.prompt.assign(text.begin(), text.begin() + prompt);
  options.forced.assign(text.begin() + prompt, text.end());
  options.sampling.seed = seed;
  return options;
}

RequestOptions WithPolicy(RequestOptions options, const PolicyCase& c, int64_t budget) {
  options.kv.policy = c.policy;
  options.kv.params = c.params;
  options.kv.budget = budget;
  options.output.kv_trace = true;
  options.output.kept = true;
  return options;
}

std::vector<int32_t> CachedTokens(const RequestOptions& options) {
  std::vector<int32_t> tokens = options.prompt;
  tokens.insert(tokens.end(), options.forced.begin(), options.forced.end() - 1);
  return tokens;
}

float LargestDifference(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  EXPECT_EQ(a.size(), b.size());
  float largest = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    largest = std::max(largest, (a[i] - b[i]).abs().max().item<float>());
  }
  return largest;
}

bool SameBits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!at::equal(a[i], b[i])) return false;
  }
  return true;
}

testing::AssertionResult Evicted(const Transcript& transcript, const Manifest& manifest) {
  if (!transcript.ok()) return testing::AssertionFailure() << transcript.finished->status;
  const KvUsage& kv = transcript.finished->kv;
  if (kv.rounds >= 5 && kv.evicted_entries >= 50 * manifest.num_layers() * manifest.num_kv_heads) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure()
         << "only " << kv.evicted_entries << " entries dropped, in " << kv.rounds << " rounds";
}

std::string CaseName(const ::testing::TestParamInfo<std::tuple<std::string, PolicyCase>>& info) {
  return absl::StrCat(std::get<0>(info.param), "_", std::get<1>(info.param).label);
}

}  // namespace epikv
