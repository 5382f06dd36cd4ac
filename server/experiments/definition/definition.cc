#include "server/experiments/definition/definition.h"

#include <google/protobuf/util/message_differencer.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/durations.h"
#include "server/experiments/definition/assignment.h"
#include "server/experiments/definition/subgroups.h"

namespace epikv {
namespace {

using google::protobuf::util::MessageDifferencer;

constexpr size_t kMaxNameBytes = 63;
constexpr size_t kMaxTextBytes = 1024;
constexpr double kDefaultAlpha = 0.05;
constexpr char kDefaultLayer[] = "default";
constexpr absl::Duration kDefaultOutcomeWindow = absl::Hours(24);
constexpr absl::Duration kLongestOutcomeWindow = absl::Hours(24 * 90);
constexpr absl::Duration kShortestWindow = absl::Seconds(1);
constexpr absl::Duration kLongestWindow = absl::Hours(24);

constexpr auto kMean = v1::Metric::KIND_MEAN;
constexpr auto kProportion = v1::Metric::KIND_PROPORTION;
constexpr auto kHigher = v1::Metric::DIRECTION_HIGHER_IS_BETTER;
constexpr auto kLower = v1::Metric::DIRECTION_LOWER_IS_BETTER;
constexpr auto kNeither = v1::Metric::DIRECTION_UNSPECIFIED;

constexpr MeasuredMetric kMeasured[] = {
    {"completed", kProportion, kHigher, false},
    {"failed", kProportion, kLower, false},
    {"cancelled", kProportion, kLower, false},
    {"deadline_missed", kProportion, kLower, true},
    {"output_tokens", kMean, kNeither, false},
    {"kv_peak_tokens", kMean, kLower, false},
    {"kv_evicted_tokens", kMean, kNeither, false},
    {"queue_seconds", kMean, kLower, true},
    {"ttft_seconds", kMean, kLower, true},
    {"time_per_output_token_seconds", kMean, kLower, true},
    {"request_seconds", kMean, kLower, true},
    {"output_tokens_per_second", kMean, kHigher, true, true},
    {kShadowKlNats, kMean, kLower, false},
    {kShadowTop1Agreement, kMean, kHigher, false},
};

bool IsMeasured(absl::string_view name) {
  return std::any_of(std::begin(kMeasured), std::end(kMeasured),
                     [&](const MeasuredMetric& metric) { return metric.name == name; });
}

bool IsNeither(absl::string_view name) {
  return std::any_of(std::begin(kMeasured), std::end(kMeasured), [&](const auto& metric) {
    return metric.name == name && metric.direction == kNeither;
  });
}

// joint: what may stand between letters and digits.
bool IsName(absl::string_view name, char joint) {
  return !name.empty() && name.size() <= kMaxNameBytes &&
         absl::ascii_islower(static_cast<unsigned char>(name.front())) &&
         std::all_of(name.begin(), name.end(), [joint](unsigned char c) {
           return absl::ascii_islower(c) || absl::ascii_isdigit(c) ||
                  c == static_cast<unsigned char>(joint);
         });
}

class Checker {
 public:
  explicit Checker(const v1::Experiment& experiment) : experiment_(experiment) {}

  void CheckNames();
  void CheckArms();
  void CheckTraffic();
  void CheckMetrics();
  void CheckTimes();
  void CheckSwitchback();
  void CheckSubgroups();
  void CheckPairs();
  std::vector<FieldViolation> Take() { return std::move(violations_); }

 private:
  void Violate(absl::string_view field, std::string description) {
    if (violations_.size() == kMaxViolations) return;
    violations_.push_back({absl::StrCat("experiment.", field), std::move(description)});
  }
  void CheckName(absl::string_view field, absl::string_view name, char joint = '-') {
    if (IsName(name, joint)) return;
    Violate(field, absl::StrCat("must be a lower-case letter, then letters, digits or '",
                                std::string(1, joint), "', at most ", kMaxNameBytes,
                                " bytes in all; is '", ShortName(name), "'"));
  }
  void CheckText(absl::string_view field, absl::string_view text) {
    if (text.size() <= kMaxTextBytes) return;
    Violate(field, absl::StrCat("has ", text.size(), " bytes, at most ", kMaxTextBytes));
  }
  static std::string ShortName(absl::string_view name) {
    return std::string(name.substr(0, kMaxNameBytes));
  }
  bool Measures(const MeasuredMetric& metric) const {
    return !metric.of_windows || experiment_.has_switchback();
  }
  bool Knows(absl::string_view metric) const {
    return std::any_of(std::begin(kMeasured), std::end(kMeasured),
                       [&](const MeasuredMetric& measured) {
                         return measured.name == metric && Measures(measured);
                       }) ||
           std::any_of(experiment_.metrics().begin(), experiment_.metrics().end(),
                       [&](const v1::Metric& declared) { return declared.name() == metric; });
  }
  std::string KnownMetrics() const {
    std::vector<absl::string_view> names;
    for (const v1::Metric& metric : experiment_.metrics()) names.push_back(metric.name());
    for (const MeasuredMetric& metric : kMeasured) {
      if (Measures(metric)) names.push_back(metric.name);
    }
    return absl::StrJoin(names, ", ");
  }

  const v1::Experiment& experiment_;
  std::vector<FieldViolation> violations_;
};

void Checker::CheckNames() {
  CheckName("name", experiment_.name());
  CheckName("layer", experiment_.layer());
  // One that was not given is the name, whose fault is told already.
  if (experiment_.salt() != experiment_.name()) CheckName("salt", experiment_.salt());
  CheckText("hypothesis", experiment_.hypothesis());
  CheckText("sample_ratio_explanation", experiment_.sample_ratio_explanation());
}

void Checker::CheckArms() {
  const int count = experiment_.arms_size();
  if (count < 2 || count > kMaxArms) {
    Violate("arms", absl::StrCat("there must be 2 to ", kMaxArms, ", there are ", count));
    return;
  }
  uint64_t weight = 0;
  int controls = 0;
  std::set<std::string> names;
  for (int i = 0; i < count; ++i) {
    const v1::Arm& arm = experiment_.arms(i);
    const std::string field = absl::StrCat("arms[", i, "]");
    CheckName(field + ".name", arm.name());
    if (arm.name() == "none" || arm.name() == "other") {
      Violate(field + ".name", absl::StrCat("'", arm.name(), "' cannot be the name of an arm"));
    }
    if (!names.insert(arm.name()).second) {
      Violate(field + ".name", absl::StrCat("'", ShortName(arm.name()), "' is given twice"));
    }
    if (arm.weight_permille() == 0) Violate(field + ".weight_permille", "must be at least 1");
    if (!arm.kv().cache_salt().empty()) {
      Violate(field + ".kv.cache_salt", "is the request's own: an arm cannot replace it");
    }
    weight += arm.weight_permille();
    controls += arm.control() ? 1 : 0;
  }
  if (weight != 1000) Violate("arms", absl::StrCat("weights must sum to 1000, are ", weight));
  if (controls != 1) {
    Violate("arms", absl::StrCat("exactly one must be the control, ", controls, " are"));
  }
}

void Checker::CheckTraffic() {
  const uint32_t traffic = experiment_.traffic_permille();
  if (traffic < 1 || traffic > 1000) {
    Violate("traffic_permille", absl::StrCat("must be from 1 to 1000, is ", traffic));
  }
  for (std::string& fault : LabelFaults(experiment_.eligibility().labels())) {
    Violate("eligibility.labels", std::move(fault));
  }
}

void Checker::CheckMetrics() {
  if (experiment_.metrics_size() > kMaxMetrics) {
    Violate("metrics",
            absl::StrCat("has ", experiment_.metrics_size(), " items, at most ", kMaxMetrics));
    return;
  }
  std::set<std::string> names;
  for (int i = 0; i < experiment_.metrics_size(); ++i) {
    const v1::Metric& metric = experiment_.metrics(i);
    const std::string field = absl::StrCat("metrics[", i, "]");
    CheckName(field + ".name", metric.name(), '_');
    if (IsMeasured(metric.name())) {
      Violate(field + ".name", absl::StrCat("'", metric.name(), "' is measured by the server"));
    }
    if (!names.insert(metric.name()).second) {
      Violate(field + ".name", absl::StrCat("'", ShortName(metric.name()), "' is given twice"));
    }
    auto check_enum = [&](absl::string_view name, bool valid, int value) {
      if (!valid) Violate(absl::StrCat(field, ".", name), absl::StrCat("unknown value ", value));
    };
    if (!(metric.tau() >= 0 && std::isfinite(metric.tau()))) {
      Violate(field + ".tau", absl::StrCat("must be a finite number >= 0, is ", metric.tau()));
    }
    check_enum("kind", v1::Metric::Kind_IsValid(metric.kind()), metric.kind());
    check_enum("direction", v1::Metric::Direction_IsValid(metric.direction()), metric.direction());
    check_enum("covariate", v1::Metric::Covariate_IsValid(metric.covariate()), metric.covariate());
  }
  if (!experiment_.primary_metric().empty() && !Knows(experiment_.primary_metric())) {
    Violate("primary_metric",
            absl::StrCat("unknown metric '", ShortName(experiment_.primary_metric()),
                         "'; known: ", KnownMetrics()));
  }
  if (experiment_.guardrails_size() > kMaxMetrics) {
    Violate("guardrails",
            absl::StrCat("has ", experiment_.guardrails_size(), " items, at most ", kMaxMetrics));
    return;
  }
  std::set<std::string> guarded;
  for (int i = 0; i < experiment_.guardrails_size(); ++i) {
    const v1::Guardrail& guardrail = experiment_.guardrails(i);
    const std::string field = absl::StrCat("guardrails[", i, "]");
    if (!Knows(guardrail.metric())) {
      Violate(field + ".metric", absl::StrCat("unknown metric '", ShortName(guardrail.metric()),
                                              "'; known: ", KnownMetrics()));
    }
    if (!guarded.insert(guardrail.metric()).second) {
      Violate(field + ".metric",
              absl::StrCat("'", ShortName(guardrail.metric()), "' has a guardrail already"));
    }
    if (IsNeither(guardrail.metric())) {
      Violate(
          field + ".metric",
          absl::StrCat("'", guardrail.metric(),
                       "' cannot have a guardrail: neither a higher nor a lower value is better"));
    }
    if (!(guardrail.margin() >= 0 && std::isfinite(guardrail.margin()))) {
      Violate(field + ".margin",
              absl::StrCat("must be a finite number >= 0, is ", guardrail.margin()));
    }
  }
}

void Checker::CheckTimes() {
  if (!(experiment_.alpha() > 0 && experiment_.alpha() < 0.5)) {
    Violate("alpha", absl::StrCat("must be in (0, 0.5), is ", experiment_.alpha()));
  }
  if (!IsTimestamp(experiment_.end_time())) {
    Violate("end_time", "must be in the years 1 to 9999");
  }
  const absl::Duration window = DurationOf(experiment_.outcome_window());
  if (window <= absl::ZeroDuration() || window > kLongestOutcomeWindow) {
    Violate("outcome_window", absl::StrCat("must be more than 0 and at most ",
                                           absl::FormatDuration(kLongestOutcomeWindow), ", is ",
                                           absl::FormatDuration(window)));
  }
}

// What concerns parts of the server's requests has no place in it.
void Checker::CheckSwitchback() {
  if (!experiment_.has_switchback()) return;
  const absl::Duration window = DurationOf(experiment_.switchback().window());
  const absl::Duration wash_out = DurationOf(experiment_.switchback().wash_out());
  auto is_whole = [](absl::Duration duration) {
    return absl::Trunc(duration, absl::Milliseconds(1)) == duration;
  };
  if (window < kShortestWindow || window > kLongestWindow || !is_whole(window)) {
    Violate("switchback.window",
            absl::StrCat("must be from ", absl::FormatDuration(kShortestWindow), " to ",
                         absl::FormatDuration(kLongestWindow), ", in whole milliseconds, is ",
                         absl::FormatDuration(window)));
  }
  if (wash_out < absl::ZeroDuration() || wash_out >= window || !is_whole(wash_out)) {
    Violate("switchback.wash_out",
            absl::StrCat("must be at least 0 and less than the window, in whole milliseconds, is ",
                         absl::FormatDuration(wash_out)));
  }
  constexpr absl::string_view kWhole = ": a switchback takes the whole server";
  if (experiment_.traffic_permille() > 0 && experiment_.traffic_permille() < 1000) {
    Violate("traffic_permille",
            absl::StrCat("must be 1000, is ", experiment_.traffic_permille(), kWhole));
  }
  if (experiment_.eligibility().min_prompt_tokens() > 0) {
    Violate("eligibility.min_prompt_tokens",
            absl::StrCat("must be 0, is ", experiment_.eligibility().min_prompt_tokens(), kWhole));
  }
  if (experiment_.eligibility().labels_size() > 0) {
    Violate("eligibility.labels", absl::StrCat("must be none", kWhole));
  }
  for (int i = 0; i < experiment_.metrics_size(); ++i) {
    if (experiment_.metrics(i).covariate() == v1::Metric::COVARIATE_UNSPECIFIED) continue;
    Violate(absl::StrCat("metrics[", i, "].covariate"),
            "must be none: a switchback counts windows, and a window has no covariate");
  }
}

void Checker::CheckSubgroups() {
  if (!experiment_.has_subgroups()) return;
  const v1::Subgroups& subgroups = experiment_.subgroups();
  if (experiment_.has_switchback()) {
    Violate("subgroups", "must be none: a window holds requests of all classes");
  }
  if (subgroups.prompt_token_edges().empty() && !subgroups.has_label()) {
    Violate("subgroups", "names no classes: give prompt_token_edges, a label, or leave it out");
  }
  const auto& edges = subgroups.prompt_token_edges();
  const bool increase =
      std::adjacent_find(edges.begin(), edges.end(), std::greater_equal<>()) == edges.end();
  if (static_cast<size_t>(edges.size()) > kMaxSubgroupEdges || !increase ||
      (!edges.empty() && edges[0] < 1)) {
    Violate("subgroups.prompt_token_edges",
            absl::StrCat(
                "must increase from 1 or more, and be at most ", kMaxSubgroupEdges, "; are ",
                absl::StrJoin(edges.begin(), edges.begin() + std::min(edges.size(), 10), ", ")));
  }
  if (!subgroups.has_label()) return;
  const v1::SubgroupLabel& label = subgroups.label();
  auto fits = [](const std::string& text) {
    return !text.empty() && text.size() <= kMaxLabelBytes && !absl::StrContains(text, '\0');
  };
  if (!fits(label.key())) {
    Violate("subgroups.label.key",
            absl::StrCat("must have 1 to ", kMaxLabelBytes, " bytes, none of them 0"));
  }
  const std::set<std::string> values(label.values().begin(), label.values().end());
  if (values.empty() || values.size() > kMaxSubgroupValues ||
      values.size() != static_cast<size_t>(label.values_size()) || values.count("other") > 0 ||
      !std::all_of(values.begin(), values.end(), fits)) {
    Violate(
        "subgroups.label.values",
        absl::StrCat("must be 1 to ", kMaxSubgroupValues, ", each once, of 1 to ", kMaxLabelBytes,
                     " bytes, none of them 0, and not 'other', there are ", label.values_size()));
  }
}

void Checker::CheckPairs() {
  if (!experiment_.has_pairs()) return;
  const uint32_t permille = experiment_.pairs().permille();
  if (permille < 1 || permille > 1000) {
    Violate("pairs.permille", absl::StrCat("must be from 1 to 1000, is ", permille));
  }
  if (experiment_.arms_size() != 2) {
    Violate("pairs", absl::StrCat("are of exactly two arms, the control and one other; there are ",
                                  experiment_.arms_size()));
  }
  if (experiment_.has_switchback()) {
    Violate("pairs", "must be none: in a switchback no user has an arm");
  }
}

uint32_t KvGroups(const v1::KvOptions& kv) {
  uint32_t groups = 0;
  if (!kv.policy().empty() || kv.has_policy_params() ||
      kv.budget_case() != v1::KvOptions::BUDGET_NOT_SET) {
    groups |= kChoice;
  }
  if (kv.positions() != v1::POSITION_MODE_UNSPECIFIED) groups |= kPositions;
  if (kv.has_protect_prompt() || kv.has_sink_tokens() || kv.has_recent_tokens() ||
      kv.protected_spans_size() > 0 || kv.has_equal_protection() || kv.has_thinking()) {
    groups |= kProtection;
  }
  if (kv.bypass_prefix_cache()) groups |= kPrefixCache;
  if (kv.has_tier()) groups |= kTier;
  if (kv.read_tokens() > 0) groups |= kReading;
  return groups;
}

}  // namespace

absl::Span<const MeasuredMetric> MeasuredMetrics() { return kMeasured; }

std::vector<std::string> LabelFaults(
    const google::protobuf::Map<std::string, std::string>& labels) {
  std::vector<std::string> faults;
  if (const size_t items = labels.size(); items > kMaxLabels) {
    faults.push_back(absl::StrCat("has ", items, " items, at most ", kMaxLabels));
  }
  const bool fit = std::all_of(labels.begin(), labels.end(), [](const auto& label) {
    return !label.first.empty() && label.first.size() <= kMaxLabelBytes &&
           label.second.size() <= kMaxLabelBytes;
  });
  if (!fit) {
    faults.push_back(
        absl::StrCat("keys must have 1 to ", kMaxLabelBytes, " bytes, values at most as many"));
  }
  return faults;
}

v1::Experiment WithDefaults(v1::Experiment experiment) {
  if (experiment.layer().empty()) experiment.set_layer(kDefaultLayer);
  if (experiment.salt().empty()) experiment.set_salt(experiment.name());
  if (experiment.alpha() == 0) experiment.set_alpha(kDefaultAlpha);
  if (!experiment.has_outcome_window()) {
    *experiment.mutable_outcome_window() = DurationProto(kDefaultOutcomeWindow);
  }
  if (experiment.has_switchback() && !experiment.switchback().has_wash_out()) {
    const absl::Duration window = DurationOf(experiment.switchback().window());
    *experiment.mutable_switchback()->mutable_wash_out() =
        DurationProto(absl::Trunc(window / 10, absl::Milliseconds(1)));
  }
  for (v1::Metric& metric : *experiment.mutable_metrics()) {
    if (metric.kind() == v1::Metric::KIND_UNSPECIFIED) metric.set_kind(kMean);
    if (metric.direction() == v1::Metric::DIRECTION_UNSPECIFIED) metric.set_direction(kHigher);
  }
  return experiment;
}

std::vector<FieldViolation> CheckDefinition(const v1::Experiment& experiment) {
  Checker checker(experiment);
  checker.CheckNames();
  checker.CheckArms();
  checker.CheckTraffic();
  checker.CheckMetrics();
  checker.CheckTimes();
  checker.CheckSwitchback();
  checker.CheckSubgroups();
  checker.CheckPairs();
  return checker.Take();
}

bool Rebuckets(const v1::Experiment& before, const v1::Experiment& after) {
  if (before.layer() != after.layer() || before.salt() != after.salt() ||
      before.traffic_permille() != after.traffic_permille() ||
      before.has_switchback() != after.has_switchback() ||
      !MessageDifferencer::Equals(before.switchback(), after.switchback()) ||
      before.arms_size() != after.arms_size() ||
      !MessageDifferencer::Equals(before.eligibility(), after.eligibility())) {
    return true;
  }
  for (int i = 0; i < before.arms_size(); ++i) {
    if (!MessageDifferencer::Equals(before.arms(i), after.arms(i))) return true;
  }
  return false;
}

bool Redecides(const v1::Experiment& before, const v1::Experiment& after) {
  if (before.alpha() != after.alpha() || before.primary_metric() != after.primary_metric() ||
      !MessageDifferencer::Equals(before.subgroups(), after.subgroups()) ||
      before.has_pairs() != after.has_pairs() ||
      !MessageDifferencer::Equals(before.pairs(), after.pairs())) {
    return true;
  }
  return !std::all_of(before.metrics().begin(), before.metrics().end(), [&](const auto& metric) {
    return std::any_of(after.metrics().begin(), after.metrics().end(), [&](const auto& other) {
      return MessageDifferencer::Equals(metric, other);
    });
  });
}

uint32_t GroupsOf(const v1::Arm& arm) {
  return KvGroups(arm.kv()) | (arm.has_steering() ? uint32_t{kSteered} : 0);
}

std::string GroupNames(uint32_t groups) {
  std::vector<absl::string_view> names;
  if (groups & kChoice) names.push_back("policy and budget");
  if (groups & kPositions) names.push_back("positions");
  if (groups & kProtection) names.push_back("protection");
  if (groups & kPrefixCache) names.push_back("prefix cache");
  if (groups & kSteered) names.push_back("steering");
  if (groups & kTier) names.push_back("tier");
  if (groups & kReading) names.push_back("what is read");
  return absl::StrJoin(names, ", ");
}

uint32_t GroupsOf(const v1::Experiment& experiment) {
  uint32_t groups = 0;
  for (const v1::Arm& arm : experiment.arms()) groups |= GroupsOf(arm);
  return groups;
}

v1::KvOptions Overridden(const v1::KvOptions& asked, const v1::KvOptions& arm) {
  const uint32_t groups = KvGroups(arm);
  v1::KvOptions kv = asked;
  if (groups & kChoice) {
    kv.clear_policy();
    kv.clear_policy_params();
    kv.clear_budget();
  }
  if (groups & kProtection) {
    kv.clear_protect_prompt();
    kv.clear_sink_tokens();
    kv.clear_recent_tokens();
    kv.clear_protected_spans();
    kv.clear_equal_protection();
    kv.clear_thinking();
  }
  if (groups & kTier) kv.clear_tier();
  kv.MergeFrom(arm);  // what is left is scalar, and set by both or by one
  return kv;
}

bool RoundsRows(const v1::KvOptions& kv) {
  const auto& given = kv.policy_params().fields();
  const auto bits = given.find("bits");
  return bits != given.end() && bits->second.list_value().values_size() > 0;
}

int64_t BudgetTokens(const v1::KvOptions& kv, int64_t tokens) {
  if (kv.has_max_tokens()) return std::min<int64_t>(kv.max_tokens(), tokens);
  if (kv.has_keep_ratio()) return TokensOf(kv.keep_ratio(), tokens);
  return tokens;
}

}  // namespace epikv
