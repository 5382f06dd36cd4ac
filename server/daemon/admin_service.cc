#include "server/daemon/admin_service.h"

#include <grpc/support/time.h>
#include <grpcpp/alarm.h>
#include <prometheus/text_serializer.h>

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/base/steady_time.h"
#include "server/base/durations.h"
#include "server/daemon/config_checks.h"
#include "server/models/model_service.h"

namespace epikv {
namespace {

v1::ServerStatus::State ToProto(ServerState state) {
  switch (state) {
    case ServerState::kStarting:
      return v1::ServerStatus::STATE_STARTING;
    case ServerState::kServing:
      return v1::ServerStatus::STATE_SERVING;
    case ServerState::kDraining:
      return v1::ServerStatus::STATE_DRAINING;
  }
  return v1::ServerStatus::STATE_UNSPECIFIED;
}

v1::ActiveRequest::State ToProto(RequestState state) {
  switch (state) {
    case RequestState::kQueued:
      return v1::ActiveRequest::STATE_QUEUED;
    case RequestState::kPrefill:
      return v1::ActiveRequest::STATE_PREFILL;
    case RequestState::kDecode:
      return v1::ActiveRequest::STATE_DECODE;
  }
  return v1::ActiveRequest::STATE_UNSPECIFIED;
}

v1::ActiveRequest::WaitsFor ToProto(WaitsFor waits_for) {
  switch (waits_for) {
    case WaitsFor::kNothing:
      break;
    case WaitsFor::kTurn:
      return v1::ActiveRequest::WAITS_FOR_TURN;
    case WaitsFor::kKv:
      return v1::ActiveRequest::WAITS_FOR_KV;
    case WaitsFor::kPlace:
      return v1::ActiveRequest::WAITS_FOR_PLACE;
    case WaitsFor::kReader:
      return v1::ActiveRequest::WAITS_FOR_READER;
  }
  return v1::ActiveRequest::WAITS_FOR_UNSPECIFIED;
}

v1::ActiveRequest ToProto(const RequestFacts& facts, const std::string& model, absl::Time now) {
  v1::ActiveRequest request;
  request.set_request_id(facts.id);
  request.set_model(model);
  request.set_state(ToProto(facts.state));
  request.set_waits_for(ToProto(facts.waits_for));
  request.set_policy(facts.policy);
  request.set_budget_tokens(facts.budget);
  request.set_completion(facts.completion);
  request.set_prompt_tokens(facts.prompt_tokens);
  request.set_cached_tokens(facts.cached_tokens);
  request.set_output_tokens(facts.output_tokens);
  request.set_max_output_tokens(facts.max_output_tokens);
  request.set_kv_used_bytes(facts.kv_used_bytes);
  request.set_kv_reserved_bytes(facts.kv_reserved_bytes);
  *request.mutable_age() = DurationProto(now - facts.arrival);
  if (facts.deadline != absl::InfiniteFuture()) {
    *request.mutable_time_left() = DurationProto(facts.deadline - now);
  }
  return request;
}

// What the engines of several models say of their requests.
struct Survey {
  explicit Survey(size_t models) : missing(models), of_model(models) {}

  absl::Mutex mu;
  bool answered ABSL_GUARDED_BY(mu) = false;
  size_t missing ABSL_GUARDED_BY(mu);
  std::vector<std::vector<RequestFacts>> of_model ABSL_GUARDED_BY(mu);
};

grpc::Status Precondition(absl::string_view reason, std::string message) {
  return ToGrpc(Rejection{.code = absl::StatusCode::kFailedPrecondition,
                          .reason = std::string(reason),
                          .message = std::move(message)});
}

grpc::Status Taken(const std::string& name) {
  return AlreadyExists(
      "model", name,
      absl::StrCat("a model '", name,
                   "' is served already; set `replace` to put this one in its place"));
}

grpc::Status Invalid(std::vector<FieldViolation> violations) {
  return ToGrpc(InvalidRequest(std::move(violations)));
}

}  // namespace

AdminService::AdminService(Models& models, Lifecycle& lifecycle, Settings& settings,
                           const Frontend& frontend, Load load)
    : Service(frontend),
      models_(models),
      lifecycle_(lifecycle),
      settings_(settings),
      load_(std::move(load)) {
  AnswerAtOnce("AdminService/GetServerStatus", &AdminService::GetServerStatus);
  AnswerAtOnce("AdminService/GetLoad", &AdminService::GetLoad);
  AnswerLater("AdminService/ListActiveRequests", &AdminService::ListActiveRequests);
  AnswerAtOnce("AdminService/Drain", &AdminService::Drain);
  AnswerAtOnce("AdminService/Resume", &AdminService::Resume);
  AnswerAtOnce("AdminService/GetConfig", &AdminService::GetConfig);
  AnswerAtOnce("AdminService/UpdateConfig", &AdminService::UpdateConfig);
  AnswerLater("AdminService/LoadModel", &AdminService::LoadModel);
  AnswerAtOnce("AdminService/UnloadModel", &AdminService::UnloadModel);
  AnswerAtOnce("AdminService/FlushPrefixCache", &AdminService::FlushPrefixCache);
  AnswerLater("AdminService/DumpState", &AdminService::DumpState);
}

AdminService::~AdminService() {
  std::thread loader;
  {
    absl::MutexLock lock(&mu_);
    loader.swap(loader_);
  }
  if (loader.joinable()) loader.join();
}

std::shared_ptr<PendingAnswer<v1::Model>> AdminService::TakeLoadCall() {
  absl::MutexLock lock(&mu_);
  return std::exchange(load_call_, nullptr);
}

bool AdminService::AbandonLoading() {
  const auto call = TakeLoadCall();
  if (call == nullptr) return false;
  call->Finish(
      Unavailable(kDraining, "the server is stopping; the model was not loaded", kDrainRetryDelay));
  return true;
}

void AdminService::ListRequests(const std::vector<ModelPtr>& models,
                                std::function<void(std::vector<v1::ActiveRequest>)> tell) {
  if (models.empty()) return tell({});
  std::vector<std::string> names;
  for (const ModelPtr& model : models) names.push_back(model->name);
  auto survey = std::make_shared<Survey>(models.size());
  auto answer = [survey, names = std::move(names), tell = std::move(tell)] {
    const absl::Time now = SteadyNow();
    std::vector<v1::ActiveRequest> all;
    absl::MutexLock lock(&survey->mu);
    for (size_t i = 0; i < names.size(); ++i) {
      for (const RequestFacts& facts : survey->of_model[i]) {
        all.push_back(ToProto(facts, names[i], now));
      }
    }
    tell(std::move(all));
  };
  // An engine whose step hangs never answers.
  auto late = std::make_shared<grpc::Alarm>();
  late->Set(gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_seconds(5, GPR_TIMESPAN)),
            [this, survey, answer](bool) {
              absl::MutexLock lock(&survey->mu);
              if (!std::exchange(survey->answered, true)) answers_.Post(answer);
            });
  for (size_t i = 0; i < models.size(); ++i) {
    models[i]->engine->Describe([survey, i, late](std::vector<RequestFacts> facts) {
      absl::MutexLock lock(&survey->mu);
      survey->of_model[i] = std::move(facts);
      if (--survey->missing == 0) late->Cancel();
    });
  }
}

v1::ServerStatus AdminService::Status() const {
  v1::ServerStatus status;
  status.set_state(ToProto(lifecycle_.state()));
  status.set_version(EPIKV_VERSION);
  status.mutable_start_time()->set_seconds(absl::ToUnixSeconds(start_));
  for (const ModelPtr& model : models_.Live()) {
    v1::ModelStatus& of_model = *status.add_models();
    of_model.set_name(model->name);
    of_model.set_state(models_.Replaced(*model) ? v1::ModelStatus::STATE_RETIRING
                                                : v1::ModelStatus::STATE_SERVING);
    of_model.set_live_requests(model->engine->live());
  }
  absl::MutexLock lock(&mu_);
  if (loading_.has_value()) {
    v1::ModelStatus& of_model = *status.add_models();
    of_model.set_name(*loading_);
    of_model.set_state(v1::ModelStatus::STATE_LOADING);
  }
  return status;
}

Answer<v1::ServerStatus> AdminService::GetServerStatus(const v1::GetServerStatusRequest&) {
  return Status();
}

Answer<v1::GetLoadResponse> AdminService::GetLoad(const v1::GetLoadRequest&) {
  v1::GetLoadResponse response;
  for (const ModelPtr& model : models_.InService()) {
    const EngineLoad engine = model->metrics->Load();
    const StepStats& last = engine.last;
    v1::ModelLoad& load = *response.add_models();
    load.set_model(model->name);
    load.set_running_requests(last.running);
    load.set_waiting_requests(last.waiting);
    load.set_kv_used_bytes(last.kv_used_bytes);
    load.set_kv_reserved_bytes(last.kv_reserved_bytes);
    load.set_kv_capacity_bytes(last.kv_capacity_bytes);
    load.set_kv_prefix_bytes(last.kv_prefix_bytes);
    if (last.predicted_wait.has_value())
      *load.mutable_predicted_wait() = DurationProto(*last.predicted_wait);
    load.set_prompt_tokens_per_second(engine.prompt_tokens_per_second);
    load.set_output_tokens_per_second(engine.output_tokens_per_second);
  }
  return response;
}

void AdminService::ListActiveRequests(
    const v1::ListActiveRequestsRequest& request,
    const std::shared_ptr<PendingAnswer<v1::ListActiveRequestsResponse>>& pending) {
  std::vector<ModelPtr> models = models_.Live();
  if (!request.model().empty()) {
    std::erase_if(models, [&](const ModelPtr& model) { return model->name != request.model(); });
    if (models.empty()) {
      return pending->Finish(
          NotFound("model", request.model(),
                   absl::StrCat("no model '", request.model(), "' is served here")));
    }
  }
  ListRequests(models, [pending](std::vector<v1::ActiveRequest> requests) {
    v1::ListActiveRequestsResponse response;
    for (v1::ActiveRequest& active : requests) *response.add_requests() = std::move(active);
    pending->Finish(std::move(response));
  });
}

Answer<v1::ServerStatus> AdminService::Drain(const v1::DrainRequest&) {
  if (lifecycle_.state() == ServerState::kStarting) {
    return Precondition(kStarting, "the server is loading its models");
  }
  models_.StartDraining();
  return Status();
}

Answer<v1::ServerStatus> AdminService::Resume(const v1::ResumeRequest&) {
  if (lifecycle_.state() == ServerState::kStarting) {
    return Precondition(kStarting, "the server is loading its models");
  }
  if (!models_.Resume()) {
    return Precondition("STOPPING", "the server is stopping and cannot resume");
  }
  return Status();
}

Answer<v1::ServerConfig> AdminService::GetConfig(const v1::GetConfigRequest&) {
  return settings_.Get();
}

Answer<v1::ServerConfig> AdminService::UpdateConfig(const v1::UpdateConfigRequest& request) {
  const auto& paths = request.update_mask().paths();
  auto updated =
      settings_.Update(request.config(), {paths.begin(), paths.end()}, request.validate_only());
  if (const auto* rejection = std::get_if<Rejection>(&updated)) return ToGrpc(*rejection);
  return std::get<v1::ServerConfig>(std::move(updated));
}

std::optional<grpc::Status> AdminService::RefuseModels() const {
  if (lifecycle_.state() == ServerState::kStarting) {
    return Precondition(kStarting, "the server is loading its models");
  }
  if (models_.stopping()) return Precondition("STOPPING", "the server is stopping");
  return std::nullopt;
}

// On the loader's thread.
Answer<v1::Model> AdminService::LoadNow(const v1::LoadModelRequest& request) {
  ModelSource source = FromProto(request.source());
  if (const ModelPtr before = models_.Named(source.name)) {
    if (source.kv_pool_bytes == 0) source.kv_pool_bytes = before->source.kv_pool_bytes;
    if (source.threads == 0) source.threads = before->source.threads;
  }
  absl::StatusOr<ModelPtr> loaded = load_(source);
  if (!loaded.ok()) return ToGrpc(loaded.status());
  const absl::Status status = PutInService(*loaded, request.replace(), settings_, models_);
  if (absl::IsAlreadyExists(status)) return Taken((*loaded)->name);
  if (!status.ok()) return ToGrpc(status);
  return ToProto(**loaded);
}

void AdminService::LoadModel(const v1::LoadModelRequest& request,
                             const std::shared_ptr<PendingAnswer<v1::Model>>& pending) {
  std::vector<FieldViolation> violations = ViolationsOf(request.source());
  for (FieldViolation& violation : violations) violation.field.insert(0, "source.");
  if (!violations.empty()) return pending->Finish(Invalid(std::move(violations)));
  if (auto refusal = RefuseModels()) return pending->Finish(*refusal);
  const std::string& name = request.source().name();
  if (!request.replace() && models_.Has(name)) return pending->Finish(Taken(name));
  std::thread last;
  {
    absl::MutexLock lock(&mu_);
    if (!loading_.has_value()) last.swap(loader_);
  }
  if (last.joinable()) last.join();  // it has nothing left to do
  absl::MutexLock lock(&mu_);
  if (loading_.has_value() || loader_.joinable()) {
    return pending->Finish(Precondition(kLoading, "another model is being loaded"));
  }
  loading_ = request.source().name();
  load_call_ = pending;
  models_.SetLoading(*loading_);
  loader_ = std::thread([this, request] {
    const Answer<v1::Model> answer = LoadNow(request);
    models_.SetLoading("");
    {
      absl::MutexLock lock(&mu_);
      loading_.reset();
    }
    if (const auto call = TakeLoadCall()) call->Finish(answer);
  });
}

Answer<v1::UnloadModelResponse> AdminService::UnloadModel(const v1::UnloadModelRequest& request) {
  if (auto refusal = RefuseModels()) return *refusal;
  absl::Time deadline = absl::InfiniteFuture();
  if (request.has_grace()) {
    const absl::Duration grace = DurationOf(request.grace());
    if (grace < absl::ZeroDuration()) return Invalid({{"grace", "must not be negative"}});
    deadline = SteadyNow() + grace;
  }
  if (models_.Remove(request.name(), deadline)) return v1::UnloadModelResponse();
  return NotFound("model", request.name(),
                  absl::StrCat("no model '", request.name(), "' is in service"));
}

Answer<v1::FlushPrefixCacheResponse> AdminService::FlushPrefixCache(
    const v1::FlushPrefixCacheRequest& request) {
  bool found = request.model().empty();
  for (const ModelPtr& model : models_.InService()) {
    if (!request.model().empty() && model->name != request.model()) continue;
    model->engine->DropPrefixes();
    found = true;
  }
  if (found) return v1::FlushPrefixCacheResponse();
  return NotFound("model", request.model(),
                  absl::StrCat("no model '", request.model(), "' is in service"));
}

void AdminService::DumpState(const v1::DumpStateRequest&,
                             const std::shared_ptr<PendingAnswer<v1::DumpStateResponse>>& pending) {
  ListRequests(models_.Live(), [this, pending](std::vector<v1::ActiveRequest> requests) {
    v1::DumpStateResponse response;
    *response.mutable_status() = Status();
    for (v1::ActiveRequest& active : requests) {
      *response.add_requests() = std::move(active);
    }
    *response.mutable_config() = settings_.Get();
    response.set_metrics(
        prometheus::TextSerializer().Serialize(frontend().metrics.page()->Collect()));
    pending->Finish(std::move(response));
  });
}

}  // namespace epikv
