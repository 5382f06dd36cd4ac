#include "server/experiments/experiment_service.h"

#include <google/protobuf/util/field_mask_util.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "runtime/base/reason.h"
#include "server/base/durations.h"
#include "server/base/errors.h"
#include "server/experiments/definition/definition.h"
#include "server/experiments/definition/edits.h"
#include "server/experiments/figures/planner.h"
#include "server/experiments/figures/report.h"
#include "server/messages/generation_messages.h"

namespace epikv {
namespace {

using google::protobuf::util::FieldMaskUtil;

constexpr int kMaxOutcomes = 1000;  // of one call
constexpr size_t kMaxReasonBytes = 1024;
constexpr int64_t kMostWaiting = 16;  // calls of one client that look after experiments
constexpr uint32_t kMaxPoints = 200;
constexpr size_t kMaxRequestIdBytes = 128, kMaxTenantBytes = 64;
// A request's record may be on its way to a store that another replica reads.
constexpr absl::Duration kUnknownRetryDelay = absl::Seconds(1);
constexpr absl::Duration kStoreRetryDelay = absl::Seconds(1);

grpc::Status NoExperiments() {
  return ToGrpc(Rejection{
      .code = absl::StatusCode::kFailedPrecondition,
      .reason = "EXPERIMENTS_OFF",
      .message = "this server has no experiments: set --experiment_store to a place to keep them"});
}

grpc::Status Invalid(std::vector<FieldViolation> violations) {
  return ToGrpc(InvalidRequest(std::move(violations)));
}

// Why is in the log: it may name files and hosts.
grpc::Status StoreIsAway() {
  return Unavailable(kStoreUnavailable, "the experiment store cannot be reached; try again",
                     kStoreRetryDelay);
}

grpc::Status TooManyWait() {
  return Exhausted("waiting calls",
                   absl::StrCat("the queue is full: ", kMostWaiting,
                                " calls of yours that look after experiments are waiting"),
                   kStoreRetryDelay);
}

// What a store says of an experiment.
grpc::Status Failure(const absl::Status& status, const std::string& name) {
  switch (status.code()) {
    case absl::StatusCode::kNotFound:
      return NotFound("experiment", name, absl::StrCat("no experiment '", name, "'"));
    case absl::StatusCode::kAlreadyExists:
      return AlreadyExists("experiment", name,
                           absl::StrCat("an experiment '", name, "' exists already"));
    case absl::StatusCode::kUnavailable:
      return StoreIsAway();
    default:
      return ToGrpc(status);
  }
}

Answer<v1::Experiment> AnswerOf(absl::StatusOr<v1::Experiment> experiment,
                                const std::string& name) {
  if (!experiment.ok()) return Failure(experiment.status(), name);
  return *std::move(experiment);
}

// What is wrong with the options of an arm under a model, whatever the request: one token of prompt
// and as many of output as the context has room for.
std::vector<FieldViolation> CheckArm(const v1::Arm& arm, const ServedModel& model) {
  AskedRequest asked;
  asked.options.prompt = {0};
  asked.options.stop.max_output_tokens = model.admission->manifest().context_length - 1;
  SetKv(arm.kv(), asked);
  if (arm.has_steering()) SetSteering(arm.steering(), asked);
  const std::variant<Request, Rejection> resolved = Resolve(std::move(asked), *model.admission);
  const auto* rejection = std::get_if<Rejection>(&resolved);
  if (rejection == nullptr) return {};
  std::vector<FieldViolation> violations;
  for (const FieldViolation& violation : rejection->violations) {
    absl::string_view field = violation.field;
    const bool steers =
        absl::ConsumePrefix(&field, "sampling.") && absl::StartsWith(field, "steering");
    if (!steers && !absl::StartsWith(field, "kv.")) continue;
    violations.push_back({std::string(field), violation.description});
  }
  return violations;
}

std::vector<FieldViolation> CheckOutcome(const v1::RecordOutcomeRequest& request,
                                         const std::vector<v1::Experiment>& known) {
  std::vector<FieldViolation> violations;
  auto require = [&](bool ok, const char* field, std::string must) {
    if (!ok) violations.push_back({field, std::move(must)});
  };
  require(!request.request_id().empty(), "request_id", "is empty");
  // As of requests themselves.
  require(
      request.request_id().size() <= kMaxRequestIdBytes, "request_id",
      absl::StrCat("has ", request.request_id().size(), " bytes, at most ", kMaxRequestIdBytes));
  require(request.tenant().size() <= kMaxTenantBytes, "tenant",
          absl::StrCat("has ", request.tenant().size(), " bytes, at most ", kMaxTenantBytes));
  require(std::isfinite(request.value()), "value", "must be a finite number");
  require(request.idempotency_key().size() <= kMaxKeyBytes, "idempotency_key",
          absl::StrCat("has ", request.idempotency_key().size(), " bytes, at most ", kMaxKeyBytes));
  require(request.metric().size() <= kMaxKeyBytes, "metric",
          absl::StrCat("has ", request.metric().size(), " bytes, at most ", kMaxKeyBytes));
  require(IsTimestamp(request.time()), "time", "must be in the years 1 to 9999");
  int declared = 0, proportions = 0;
  for (const v1::Experiment& experiment : known) {
    for (const v1::Metric& metric : experiment.metrics()) {
      if (metric.name() != request.metric()) continue;
      ++declared;
      proportions += metric.kind() == v1::Metric::KIND_PROPORTION;
    }
  }
  const bool is_share = request.value() == 0 || request.value() == 1;
  require(declared == 0 || proportions < declared || is_share, "value",
          absl::StrCat("must be 0 or 1: '", request.metric(), "' is a proportion"));
  return violations;
}

Answer<v1::RecordOutcomeResponse> AnswerOf(const absl::StatusOr<Recorded>& recorded,
                                           const v1::OutcomeSeen& outcome) {
  if (!recorded.ok()) return StoreIsAway();
  v1::RecordOutcomeResponse response;
  switch (*recorded) {
    case Recorded::kWritten:
      return response;
    case Recorded::kDuplicate:
      response.set_duplicate(true);
      return response;
    case Recorded::kWaiting:
    case Recorded::kSpooled:
      response.set_spooled(true);
      return response;
    case Recorded::kConflict:
      return AlreadyExists(
          "outcome", outcome.request_id(),
          absl::StrCat("another value of '", outcome.metric(),
                       "' was already recorded for request '", outcome.request_id(),
                       "' under this idempotency_key; that value is kept"),
          "OUTCOME_CONFLICT");
    case Recorded::kUnknownRequest:
      return NotFound("request", outcome.request_id(),
                      absl::StrCat("no request '", outcome.request_id(),
                                   "' of this tenant took part in an experiment"),
                      kUnknownRetryDelay);
    case Recorded::kLate:
      return ToGrpc(
          WithReason(absl::FailedPreconditionError(absl::StrCat("the outcome_window of request '",
                                                                outcome.request_id(), "' is over")),
                     "OUTCOME_LATE"));
    case Recorded::kUndeclaredMetric:
      return Invalid({{"metric", absl::StrCat("no experiment of request '", outcome.request_id(),
                                              "' declares '", outcome.metric(), "'")}});
    case Recorded::kInvalid:
      break;
  }
  return Invalid(
      {{"outcome", "cannot be stored: a text holds a NUL character, or a value is not finite"}});
}

// The error says what is out of range.
absl::StatusOr<v1::ExperimentPlan> PlanOf(const v1::PlanExperimentRequest& request) try {
  constexpr double kLoss = .01;  // of one arm's units
  const bool is_share = request.kind() == v1::Metric::KIND_PROPORTION;
  const int arms = request.arms() == 0 ? 2 : static_cast<int>(std::min(request.arms(), 1000u));
  if (arms < 2 || arms > kMaxArms) {
    return absl::InvalidArgumentError(absl::StrCat("arms must be 2 to ", kMaxArms));
  }
  if (request.pairs() && (arms != 2 || request.covariate_r2() != 0)) {
    return absl::InvalidArgumentError("pairs are of two arms, and without a covariate");
  }
  const double control = request.control_permille() == 0
                             ? 1. / arms
                             : std::min(request.control_permille(), 1000u) / 1000.;
  const double alpha = request.alpha() == 0 ? .05 : request.alpha();
  const Baseline baseline{.kind = is_share ? MetricKind::kProportion : MetricKind::kMean,
                          .sd = request.sd(),
                          .rate = request.rate()};
  const Design design{
      .alpha = request.pairs() ? AlphaPerPairedMetric(alpha) : AlphaPerArm(alpha, arms),
      .power = request.power() == 0 ? .8 : request.power(),
      .looks = request.looks() == 0 ? 20 : static_cast<int>(request.looks()),
      .control_share = control,
      .treatment_share = (1 - control) / (arms - 1),
      .covariate_r2 = request.covariate_r2(),
      .paired = request.pairs()};
  if (request.aim_case() == v1::PlanExperimentRequest::AIM_NOT_SET) {
    return absl::InvalidArgumentError(
        "set either `effect` (the effect to find) or `units` (how many there will be)");
  }
  int64_t units = static_cast<int64_t>(request.units());
  absl::StatusOr<UnitPlan> plan = absl::UnknownError("");
  if (request.has_effect()) {
    plan = PlanUnits(baseline, request.effect(), design);
    if (!plan.ok()) return plan.status();
    units = plan->units;
  }
  const absl::StatusOr<DetectableEffects> effects = PlanEffects(baseline, units, design);
  if (!effects.ok()) return effects.status();
  v1::ExperimentPlan answer;
  answer.set_units(static_cast<uint64_t>(units));
  answer.set_power(plan.ok() ? plan->power : design.power);
  if (plan.ok() && !request.pairs()) answer.set_tau(plan->tau);
  if (effects->up.has_value()) answer.set_effect_up(*effects->up);
  if (effects->down.has_value()) answer.set_effect_down(*effects->down);
  if (request.pairs()) return answer;
  std::vector<double> weights(static_cast<size_t>(arms), design.treatment_share);
  weights.front() = control;
  const auto ratio = PlanSampleRatioUnits(weights, 1, kLoss, design.power);
  if (ratio.ok()) answer.set_sample_ratio_units(static_cast<uint64_t>(*ratio));
  return answer;
} catch (const std::exception& e) {  // of our figures (require.h), or of Boost's
  return absl::InternalError(absl::StrCat("these numbers cannot be planned for: ", e.what()));
}

// The answers of a batch, which come in any order.
class Batch {
 public:
  Batch(int size, std::shared_ptr<PendingAnswer<v1::BatchRecordOutcomesResponse>> pending)
      : pending_(std::move(pending)), left_(size) {
    for (int i = 0; i < size; ++i) response_.add_results();
  }

  void Set(int index, const Answer<v1::RecordOutcomeResponse>& answer) {
    if (Keep(index, answer)) pending_->Finish(std::move(response_));
  }

 private:
  // True: it was the last, and nobody else looks any more.
  bool Keep(int index, const Answer<v1::RecordOutcomeResponse>& answer) {
    absl::MutexLock lock(&mu_);
    auto& result = *response_.mutable_results(index);
    if (const auto* status = std::get_if<grpc::Status>(&answer)) {
      result.set_code(status->error_code());
      result.set_reason(ErrorReason(*status));
      result.set_message(status->error_message());
      if (const auto after = RetryDelayIn(*status)) {
        *result.mutable_retry_delay() = DurationProto(*after);
      }
    } else {
      *result.mutable_response() = std::get<v1::RecordOutcomeResponse>(answer);
    }
    return --left_ == 0;
  }

  const std::shared_ptr<PendingAnswer<v1::BatchRecordOutcomesResponse>> pending_;
  absl::Mutex mu_;
  int left_ ABSL_GUARDED_BY(mu_);
  v1::BatchRecordOutcomesResponse response_;  // under mu_ until the last is there
};

}  // namespace

ExperimentService::ExperimentService(Experiments* experiments, const Models& models,
                                     const Frontend& frontend)
    : Service(frontend), experiments_(experiments), models_(models) {
  using Self = ExperimentService;
  Manage("ExperimentService/ListExperiments", definitions_, &Self::ListExperiments);
  Manage("ExperimentService/GetExperiment", definitions_, &Self::GetExperiment);
  Manage("ExperimentService/CreateExperiment", definitions_, &Self::CreateExperiment);
  Manage("ExperimentService/UpdateExperiment", definitions_, &Self::UpdateExperiment);
  Manage("ExperimentService/StartExperiment", definitions_, &Self::StartExperiment);
  Manage("ExperimentService/StopExperiment", definitions_, &Self::StopExperiment);
  Manage("ExperimentService/GetExperimentReport", reports_, &Self::GetExperimentReport);
  Manage("ExperimentService/PlanExperiment", reports_, &Self::PlanExperiment);
  AnswerLater("ExperimentService/RecordOutcome", &Self::RecordOutcome);
  AnswerLater("ExperimentService/BatchRecordOutcomes", &Self::BatchRecordOutcomes);
}

// handle's second argument, where it has one, tells whether its client has gone.
template <typename Request, typename Response, typename... Cancelled>
void ExperimentService::Manage(absl::string_view method, TaskThread& thread,
                               Answer<Response> (ExperimentService::*handle)(const Request&,
                                                                             Cancelled...)) {
  AnswerLater<Request, Response>(
      method, [this, &thread, handle](const Request& request,
                                      const std::shared_ptr<PendingAnswer<Response>>& pending) {
        if (experiments_ == nullptr) return pending->Finish(NoExperiments());
        const std::string& caller = pending->scope().caller().name;
        if (thread.Waiting(caller) >= kMostWaiting) return pending->Finish(TooManyWait());
        thread.Post(caller, [this, request, handle, pending] {
          auto cancelled = [&pending] { return pending->scope().context().IsCancelled(); };
          if (cancelled()) return pending->Finish(grpc::Status(grpc::CANCELLED, "cancelled"));
          if constexpr (sizeof...(Cancelled) == 0) {
            pending->Finish((this->*handle)(request));
          } else {
            pending->Finish((this->*handle)(request, cancelled));
          }
        });
      });
}

Answer<v1::ListExperimentsResponse> ExperimentService::ListExperiments(
    const v1::ListExperimentsRequest&) {
  absl::StatusOr<Definitions> all = experiments_->store().Experiments();
  if (!all.ok()) return Failure(all.status(), "");
  v1::ListExperimentsResponse response;
  for (v1::Experiment& experiment : all->experiments) {
    *response.add_experiments() = std::move(experiment);
  }
  return response;
}

Answer<v1::Experiment> ExperimentService::GetExperiment(const v1::GetExperimentRequest& request) {
  const absl::StatusOr<Definitions> all = experiments_->store().Experiments();
  if (!all.ok()) return Failure(all.status(), request.name());
  return AnswerOf(FindExperiment(all->experiments, request.name()), request.name());
}

Answer<v1::Experiment> ExperimentService::StartExperiment(
    const v1::StartExperimentRequest& request) {
  return Change(request.name(),
                [&](const std::vector<v1::Experiment>& all) -> absl::StatusOr<v1::Experiment> {
                  absl::StatusOr<v1::Experiment> now = FindExperiment(all, request.name());
                  if (!now.ok()) return now;
                  if (absl::Status status = CheckEtag(*now, request.etag()); !status.ok()) {
                    return status;
                  }
                  return Started(*now, all, absl::Now());
                });
}

Answer<v1::Experiment> ExperimentService::StopExperiment(const v1::StopExperimentRequest& request) {
  if (const size_t bytes = request.reason().size(); bytes > kMaxReasonBytes) {
    return Invalid({{"reason", absl::StrCat("has ", bytes, " bytes, at most ", kMaxReasonBytes)}});
  }
  return Change(request.name(),
                [&](const std::vector<v1::Experiment>& all) -> absl::StatusOr<v1::Experiment> {
                  absl::StatusOr<v1::Experiment> now = FindExperiment(all, request.name());
                  if (!now.ok()) return now;
                  if (absl::Status status = CheckEtag(*now, request.etag()); !status.ok()) {
                    return status;
                  }
                  return Stopped(*now, request.reason(), absl::Now());
                });
}

Answer<v1::ExperimentReport> ExperimentService::GetExperimentReport(
    const v1::GetExperimentReportRequest& request, const std::function<bool()>& cancelled) {
  if (request.points() > kMaxPoints) {
    return Invalid({{"points", absl::StrCat("must be at most ", kMaxPoints)}});
  }
  const absl::StatusOr<Definitions> all = experiments_->store().Experiments();
  if (!all.ok()) return Failure(all.status(), request.name());
  const absl::StatusOr<v1::Experiment> experiment =
      FindExperiment(all->experiments, request.name());
  if (!experiment.ok()) return Failure(experiment.status(), request.name());
  if (experiment->state() == v1::Experiment::STATE_DRAFT) {
    return ToGrpc(
        WithReason(absl::FailedPreconditionError(absl::StrCat(
                       "'", request.name(), "' is a draft: no request has taken part yet")),
                   "EXPERIMENT_STATE"));
  }
  ReportOptions options{.lost_after = experiments_->lost_after(), .cancelled = cancelled};
  if (request.points() > 0) options.points = static_cast<int>(request.points());
  absl::StatusOr<v1::ExperimentReport> report =
      MakeReport(*experiment, experiments_->store(), options, absl::Now());
  if (!report.ok()) return Failure(report.status(), request.name());
  return *std::move(report);
}

Answer<v1::ExperimentPlan> ExperimentService::PlanExperiment(
    const v1::PlanExperimentRequest& request) {
  absl::StatusOr<v1::ExperimentPlan> plan = PlanOf(request);
  if (plan.ok()) return *std::move(plan);
  if (absl::IsInternal(plan.status())) return ToGrpc(plan.status());
  return Invalid({{"plan", std::string(plan.status().message())}});
}

Answer<v1::Experiment> ExperimentService::Change(const std::string& name, Store::Edit edit) {
  absl::StatusOr<v1::Experiment> changed = experiments_->store().Change(name, edit);
  if (changed.ok()) experiments_->Refresh();
  return AnswerOf(std::move(changed), name);
}

Answer<v1::Experiment> ExperimentService::CreateExperiment(
    const v1::CreateExperimentRequest& request) {
  const v1::Experiment draft = Drafted(WithDefaults(request.experiment()), absl::Now());
  if (std::vector<FieldViolation> violations = Check(draft); !violations.empty()) {
    return Invalid(std::move(violations));
  }
  if (request.validate_only()) return draft;
  return AnswerOf(experiments_->store().Create(draft), draft.name());
}

Answer<v1::Experiment> ExperimentService::UpdateExperiment(
    const v1::UpdateExperimentRequest& request) {
  const std::string& name = request.experiment().name();
  google::protobuf::FieldMask mask = request.update_mask();
  const std::vector<std::string> settable = SettableFields();
  if (!request.has_update_mask()) mask.mutable_paths()->Add(settable.begin(), settable.end());
  std::vector<FieldViolation> violations;
  for (const std::string& path : mask.paths()) {
    if (std::find(settable.begin(), settable.end(), path) != settable.end()) continue;
    violations.push_back(
        {"update_mask", absl::StrCat("'", ShortenText(path, 64), "' cannot be set; these can: ",
                                     absl::StrJoin(settable, ", "))});
  }
  if (!violations.empty()) return Invalid(std::move(violations));
  const absl::StatusOr<Definitions> all = experiments_->store().Experiments();
  if (!all.ok()) return Failure(all.status(), name);
  const absl::StatusOr<v1::Experiment> before = FindExperiment(all->experiments, name);
  if (!before.ok()) return Failure(before.status(), name);
  if (absl::Status status = CheckEtag(*before, request.experiment().etag()); !status.ok()) {
    return ToGrpc(status);
  }
  v1::Experiment wanted = *before;
  FieldMaskUtil::MergeOptions options;
  options.set_replace_message_fields(true);
  options.set_replace_repeated_fields(true);
  FieldMaskUtil::MergeMessageTo(request.experiment(), mask, options, &wanted);
  wanted = WithDefaults(std::move(wanted));
  violations = Check(wanted);
  if (!violations.empty()) return Invalid(std::move(violations));
  auto edit = [&](const std::vector<v1::Experiment>& now) -> absl::StatusOr<v1::Experiment> {
    absl::StatusOr<v1::Experiment> found = FindExperiment(now, name);
    if (!found.ok()) return found;
    if (absl::Status status = CheckEtag(*found, before->etag()); !status.ok()) return status;
    return Changed(*found, wanted, request.allow_rebucket(), now);
  };
  if (request.validate_only()) return AnswerOf(edit(all->experiments), name);
  return Change(name, edit);
}

std::vector<FieldViolation> ExperimentService::Check(const v1::Experiment& experiment) const {
  std::vector<FieldViolation> violations = CheckDefinition(experiment);
  if (experiment.has_pairs() && !experiments_->replays() && violations.size() < kMaxViolations) {
    violations.push_back({"experiment.pairs",
                          "must be none: this server replays no requests; set "
                          "experiment_shadow_permille above 0"});
  }
  const std::string& wanted = experiment.eligibility().model();
  for (const ModelPtr& model : models_.InService()) {
    if (!wanted.empty() && wanted != model->name) continue;
    for (int i = 0; i < experiment.arms_size(); ++i) {
      if (GroupsOf(experiment.arms(i)) == 0) continue;
      for (FieldViolation& violation : CheckArm(experiment.arms(i), *model)) {
        if (violations.size() == kMaxViolations) return violations;
        violations.push_back({absl::StrCat("experiment.arms[", i, "].", violation.field),
                              absl::StrCat(violation.description, " (model '", model->name, "')")});
      }
    }
  }
  return violations;
}

void ExperimentService::Record(const v1::RecordOutcomeRequest& request, const Identity& caller,
                               const Told& told) {
  v1::OutcomeSeen outcome;
  outcome.set_tenant(request.tenant());
  if (!caller.name.empty() && request.tenant().empty()) outcome.set_tenant(caller.name);
  if (!caller.May(Role::kOperator) && outcome.tenant() != caller.name) {
    return told(PermissionDenied(
        absl::StrCat("tenant '", request.tenant(), "' of caller '", caller.name, "'"),
        RoleName(Role::kOperator)));
  }
  if (auto violations = CheckOutcome(request, *experiments_->known()); !violations.empty()) {
    return told(Invalid(std::move(violations)));
  }
  if (experiments_->SurelyUndeclared(request.metric())) {
    return told(
        Invalid({{"metric", absl::StrCat("no experiment declares '", request.metric(), "'")}}));
  }
  const absl::Time now = absl::Now();
  outcome.set_request_id(request.request_id());
  outcome.set_metric(request.metric());
  outcome.set_value(request.value());
  outcome.set_key(request.idempotency_key());
  *outcome.mutable_time() = request.has_time() ? request.time() : TimestampProto(now);
  *outcome.mutable_received() = TimestampProto(now);
  experiments_->Record(outcome, [told, outcome](const absl::StatusOr<Recorded>& recorded) {
    told(AnswerOf(recorded, outcome));
  });
}

void ExperimentService::RecordOutcome(
    const v1::RecordOutcomeRequest& request,
    const std::shared_ptr<PendingAnswer<v1::RecordOutcomeResponse>>& pending) {
  if (experiments_ == nullptr) return pending->Finish(NoExperiments());
  Record(request, pending->scope().caller(),
         [pending](const Answer<v1::RecordOutcomeResponse>& answer) { pending->Finish(answer); });
}

void ExperimentService::BatchRecordOutcomes(
    const v1::BatchRecordOutcomesRequest& request,
    const std::shared_ptr<PendingAnswer<v1::BatchRecordOutcomesResponse>>& pending) {
  if (experiments_ == nullptr) return pending->Finish(NoExperiments());
  const int size = request.outcomes_size();
  if (size < 1 || size > kMaxOutcomes) {
    return pending->Finish(Invalid(
        {{"outcomes", absl::StrCat("there must be 1 to ", kMaxOutcomes, ", there are ", size)}}));
  }
  const Identity caller = pending->scope().caller();
  auto batch = std::make_shared<Batch>(size, pending);
  for (int i = 0; i < size; ++i) {
    Record(request.outcomes(i), caller,
           [batch, i](const Answer<v1::RecordOutcomeResponse>& answer) { batch->Set(i, answer); });
  }
}

}  // namespace epikv
