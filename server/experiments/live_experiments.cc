#include "server/experiments/live_experiments.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "server/base/durations.h"
#include "server/experiments/definition/assignment.h"
#include "server/experiments/definition/definition.h"
#include "server/experiments/definition/subgroups.h"
#include "server/experiments/definition/windows.h"

namespace epikv {
namespace {

bool IsEligible(const v1::Eligibility& eligibility, const Subject& subject) {
  if (!eligibility.model().empty() && eligibility.model() != subject.model) return false;
  if (subject.prompt_tokens < int64_t{eligibility.min_prompt_tokens()}) return false;
  const auto& labels = subject.request.labels();
  return std::all_of(eligibility.labels().begin(), eligibility.labels().end(),
                     [&](const auto& wanted) {
                       const auto found = labels.find(wanted.first);
                       return found != labels.end() && found->second == wanted.second;
                     });
}

// Whether any of its arms could change the output: by steering, by rounding, or since eviction
// could act under it. kv: as the request's own arms have it.
bool IsExposed(const v1::Experiment& experiment, const v1::KvOptions& kv, int64_t tokens) {
  return std::any_of(experiment.arms().begin(), experiment.arms().end(), [&](const v1::Arm& arm) {
    const v1::KvOptions own = Overridden(kv, arm.kv());
    return arm.has_steering() || RoundsRows(own) || BudgetTokens(own, tokens) < tokens;
  });
}

const v1::Arm* ArmCalled(const v1::Experiment& experiment, absl::string_view name) {
  const auto found = std::find_if(experiment.arms().begin(), experiment.arms().end(),
                                  [&](const v1::Arm& arm) { return arm.name() == name; });
  return found == experiment.arms().end() ? nullptr : &*found;
}

// A unit's place in each layer, hashed when it is first asked for.
class LayerBuckets {
 public:
  explicit LayerBuckets(absl::string_view unit) : unit_(unit) {}

  uint32_t In(absl::string_view layer) {
    for (const auto& [known, bucket] : buckets_) {
      if (known == layer) return bucket;
    }
    return buckets_.emplace_back(layer, LayerBucket(layer, unit_)).second;
  }

 private:
  const absl::string_view unit_;
  absl::InlinedVector<std::pair<absl::string_view, uint32_t>, 4> buckets_;
};

// By the hash of what the experiment deals: of the request's unit, or of the window it begins in.
const v1::Arm* ArmByHash(const v1::Experiment& experiment, const Subject& subject,
                         LayerBuckets& places) {
  if (!experiment.has_switchback()) {
    return ArmOf(experiment, UnitOf(subject), places.In(experiment.layer()));
  }
  return ArmOf(experiment, WindowUnit(Windows(experiment.switchback()).At(subject.began)));
}

// One of the experiments that a request takes part in.
struct Choice {
  const v1::Experiment& experiment;
  const v1::Arm& arm;
  bool forced = false;
};

// What arms replace of a request.
struct Replaced {
  v1::KvOptions kv;
  std::optional<v1::Steering> steering;  // nullopt: the request's own stays
};

Replaced ReplacedBy(const std::vector<Choice>& choices, const v1::GenerateRequest& request) {
  Replaced replaced{.kv = request.kv(), .steering = std::nullopt};
  for (const Choice& choice : choices) {
    replaced.kv = Overridden(replaced.kv, choice.arm.kv());
    if (choice.arm.has_steering()) replaced.steering = choice.arm.steering();
  }
  return replaced;
}

void Add(const std::vector<Choice>& choices, const Subject& subject, Assignment& assignment) {
  if (choices.empty()) return;
  Replaced replaced = ReplacedBy(choices, subject.request);
  assignment.kv = std::move(replaced.kv);
  assignment.steering = std::move(replaced.steering);
  for (const Choice& choice : choices) {
    assignment.steers |= (GroupsOf(choice.experiment) & kSteered) != 0;
  }
  assignment.arm = absl::StrJoin(choices, ",", [](std::string* out, const Choice& choice) {
    absl::StrAppend(out, choice.experiment.name(), "/", choice.arm.name());
  });
  for (const auto& [experiment, arm, forced] : choices) {
    v1::RequestBegan::Part part;
    part.set_experiment(experiment.name());
    part.set_bucket_version(experiment.bucket_version());
    part.set_arm(arm.name());
    part.set_forced(forced);
    part.set_exposed(
        IsExposed(experiment, assignment.kv, subject.prompt_tokens + subject.max_output_tokens));
    part.set_washed_out(experiment.has_switchback() &&
                        Windows(experiment.switchback()).IsWashedOut(subject.began));
    part.set_subgroup(SubgroupLabelOf(experiment, subject.request.labels()));
    assignment.parts.push_back(std::move(part));
  }
}

// Of the two arms of an experiment that has pairs.
const v1::Arm& OtherArm(const v1::Experiment& experiment, const v1::Arm& arm) {
  return experiment.arms(0).name() == arm.name() ? experiment.arms(1) : experiment.arms(0);
}

// Of the first experiment that has a pair of this request. Where an arm is forced there is none.
std::optional<Pairing> PairingOf(const std::vector<Choice>& choices, const Subject& subject,
                                 const std::vector<v1::RequestBegan::Part>& parts,
                                 SeenUnits& seen) {
  if (!subject.request.experiment().force_arm().empty()) return std::nullopt;
  std::optional<Pairing> pairing;
  for (size_t i = 0; i < choices.size(); ++i) {
    const v1::Experiment& experiment = choices[i].experiment;
    if (!experiment.has_pairs()) continue;
    const uint64_t hash = PairHash(experiment, UnitOf(subject));
    if (!HasPair(experiment, hash) || !seen.IsNew(hash)) continue;
    if (!parts[i].exposed() || pairing.has_value()) continue;
    const v1::Arm& other = OtherArm(experiment, choices[i].arm);
    std::vector<Choice> instead;
    for (const Choice& choice : choices) {
      const bool is_paired = &choice == &choices[i];
      instead.push_back({.experiment = choice.experiment, .arm = is_paired ? other : choice.arm});
    }
    Replaced replaced = ReplacedBy(instead, subject.request);
    pairing = Pairing{.part = static_cast<int>(i),
                      .arm = other.name(),
                      .kv = std::move(replaced.kv),
                      .steering = std::move(replaced.steering)};
  }
  return pairing;
}

}  // namespace

std::vector<FieldViolation> CheckContext(const v1::GenerateRequest& request) {
  std::vector<FieldViolation> violations;
  const v1::ExperimentContext& context = request.experiment();
  if (const size_t bytes = context.unit_id().size(); bytes > kMaxUnitBytes) {
    violations.push_back(
        {"experiment.unit_id", absl::StrCat("has ", bytes, " bytes, at most ", kMaxUnitBytes)});
  }
  if (context.has_covariate() && !std::isfinite(context.covariate())) {
    violations.push_back({"experiment.covariate", "must be a finite number"});
  }
  if (!context.force_arm().empty() && context.opt_out()) {
    violations.push_back({"experiment.force_arm", "cannot be set together with opt_out"});
  }
  for (std::string& fault : LabelFaults(request.labels())) {
    violations.push_back({"labels", std::move(fault)});
  }
  return violations;
}

absl::string_view UnitOf(const Subject& subject) {
  const std::string& unit = subject.request.experiment().unit_id();
  return unit.empty() ? subject.request_id : absl::string_view(unit);
}

v1::RequestBegan BeganOf(const Subject& subject, const Assignment& assignment) {
  const v1::ExperimentContext& context = subject.request.experiment();
  v1::RequestBegan began;
  began.set_request_id(std::string(subject.request_id));
  began.set_unit(UnitHash("unit", 0, UnitOf(subject)));
  began.set_unit_is_request(context.unit_id().empty());
  began.set_model(std::string(subject.model));
  *began.mutable_time() = TimestampProto(subject.began);
  began.set_prompt_tokens(static_cast<uint32_t>(subject.prompt_tokens));
  began.set_max_output_tokens(static_cast<uint32_t>(subject.max_output_tokens));
  if (context.has_covariate()) began.set_covariate(context.covariate());
  began.mutable_parts()->Add(assignment.parts.begin(), assignment.parts.end());
  return began;
}

void LiveExperiments::Set(std::vector<v1::Experiment> running) {
  std::sort(running.begin(), running.end(),
            [](const auto& a, const auto& b) { return a.name() < b.name(); });
  auto next = std::make_shared<const std::vector<v1::Experiment>>(std::move(running));
  absl::MutexLock lock(&mu_);
  running_ = std::move(next);
}

std::shared_ptr<const std::vector<v1::Experiment>> LiveExperiments::running() const {
  absl::MutexLock lock(&mu_);
  return running_;
}

absl::StatusOr<Assignment> LiveExperiments::Assign(const Subject& subject) const {
  const v1::ExperimentContext& context = subject.request.experiment();
  const std::pair<absl::string_view, absl::string_view> forced =
      absl::StrSplit(context.force_arm(), absl::MaxSplits('/', 1));
  bool found = context.force_arm().empty();
  Assignment assignment{.arm = std::string(kNoArm)};
  std::vector<Choice> choices;
  const auto running = this->running();
  LayerBuckets places(UnitOf(subject));
  for (const v1::Experiment& experiment : *running) {
    const bool force = !context.force_arm().empty() && experiment.name() == forced.first;
    const v1::Arm* const arm =
        force ? ArmCalled(experiment, forced.second) : ArmByHash(experiment, subject, places);
    if (arm == nullptr) continue;
    found |= force;
    if (!force && (context.opt_out() || !IsEligible(experiment.eligibility(), subject))) {
      assignment.excluded.push_back(experiment.name());
      continue;
    }
    choices.push_back({.experiment = experiment, .arm = *arm, .forced = force});
  }
  if (!found) {
    return absl::InvalidArgumentError(absl::StrCat("no running experiment has the arm '",
                                                   context.force_arm(),
                                                   "'; write it as experiment/arm"));
  }
  Add(choices, subject, assignment);
  assignment.pairing = PairingOf(choices, subject, assignment.parts, seen_);
  return assignment;
}

}  // namespace epikv
