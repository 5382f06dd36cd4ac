#pragma once

#include <google/protobuf/map.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "epikv/v1/experiment.pb.h"
#include "runtime/admission/admission.h"

// What an experiment may be, whatever is stored or served.

namespace epikv {

inline constexpr size_t kMaxUnitBytes = 128;
inline constexpr size_t kMaxKeyBytes = 64;  // of an outcome
inline constexpr size_t kMaxLabels = 8;
inline constexpr size_t kMaxLabelBytes = 64;  // of a key, of a value
// What is wrong with those of a request, or with those that one asks of requests.
std::vector<std::string> LabelFaults(const google::protobuf::Map<std::string, std::string>& labels);
inline constexpr int kMaxArms = 8;
inline constexpr int kMaxMetrics = 8;  // declared

// Measured by replays (see Shadow) of a sample of requests: means over a request's output tokens.
inline constexpr absl::string_view kShadowKlNats = "shadow_kl_nats";
inline constexpr absl::string_view kShadowTop1Agreement = "shadow_top1_agreement";

// Measured by the server itself, for every request that takes part.
struct MeasuredMetric {
  absl::string_view name;
  v1::Metric::Kind kind;
  v1::Metric::Direction direction;  // unspecified: neither is better
  // Arms share queue, batch and pool, so one arm's requests change the other's figure; but not in
  // switchback experiments.
  bool confounded;
  bool of_windows = false;  // once a window: of switchback experiments alone
};
absl::Span<const MeasuredMetric> MeasuredMetrics();

// What a definition leaves out: layer, salt, alpha, outcome_window, a switchback's wash_out, kinds
// and directions of metrics.
v1::Experiment WithDefaults(v1::Experiment experiment);

// Everything that is wrong with it, but for its arms' options, which a model must judge. Fields
// as paths in a request that has `experiment`. Precondition: WithDefaults.
std::vector<FieldViolation> CheckDefinition(const v1::Experiment& experiment);

// Units that took part in `before` could be in another arm, or in none, under `after`.
bool Rebuckets(const v1::Experiment& before, const v1::Experiment& after);

// `after` decides otherwise: alpha, the primary metric, how a metric that was declared is read,
// subgroups, or pairs.
bool Redecides(const v1::Experiment& before, const v1::Experiment& after);

// Which groups of options an arm sets: those of a group come and go together.
enum OptionGroup : uint32_t {
  kChoice = 1,  // policy, policy_params, budget
  kPositions = 2,
  kProtection = 4,  // all that says what no policy may evict
  kPrefixCache = 8,
  kSteered = 16,
  kTier = 32,
  kReading = 64,  // read_tokens
};
uint32_t GroupsOf(const v1::Arm& arm);
// Names of groups, for people: "policy and budget".
std::string GroupNames(uint32_t groups);
// All that the arms of an experiment set.
uint32_t GroupsOf(const v1::Experiment& experiment);
// What a request asked of its KV cache, with the groups that the arm sets replaced.
v1::KvOptions Overridden(const v1::KvOptions& asked, const v1::KvOptions& arm);

// It asks a policy to round rows, which it does whatever its budget (PolicyTraits::rounds_rows).
bool RoundsRows(const v1::KvOptions& kv);

// The budget in tokens of a request of so many (prompt + max output); all of them where there is
// none.
int64_t BudgetTokens(const v1::KvOptions& kv, int64_t tokens);

}  // namespace epikv
