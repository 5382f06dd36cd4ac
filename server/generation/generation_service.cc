#include "server/generation/generation_service.h"

#include <optional>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/base/reason.h"
#include "runtime/base/steady_time.h"
#include "server/base/errors.h"
#include "server/generation/call_facts.h"
#include "server/generation/collect_call.h"
#include "server/generation/stream_call.h"
#include "server/metrics/request_series.h"

namespace epikv {

GenerationService::GenerationService(const Models& models, Courier& courier,
                                     const Frontend& frontend, const GenerationOptions& options)
    : Service(frontend),
      models_(models),
      courier_(courier),
      metrics_(frontend.metrics),
      options_(options),
      preparer_(options.experiments, *options.packets, options.sessions,
                {.shared_prefixes = options.shared_prefixes, .pairs = options.shadow != nullptr}) {
  Add("GenerationService/Generate", [this](grpc::CallbackServerContext& context) {
    return new StreamCall("GenerationService/Generate", context, this->frontend(), live_calls_,
                          [this](const grpc::ByteBuffer& in, StreamCall& call) {
                            BeginRequest<v1::GenerateRequest>(in, call);
                          });
  });
  AddCollected<v1::GenerateRequest, v1::GenerateResult>("GenerationService/GenerateOnce");
  AddCollected<v1::ScoreRequest, v1::ScoreResponse>("GenerationService/Score");
  Add("PacketService/CreatePacket", [this](grpc::CallbackServerContext& context) {
    return new PacketCall(
        context, this->frontend(), live_calls_, options_.max_answer_bytes, *options_.packets,
        keeping_, [this](const grpc::ByteBuffer& in, CollectCall<v1::GenerateResult>& call) {
          BeginPacket(in, static_cast<PacketCall&>(call));
        });
  });
  AnswerAtOnce("GenerationService/CancelRequest", &GenerationService::CancelRequest);
}

template <typename Message, typename Result>
void GenerationService::AddCollected(absl::string_view method) {
  Add(method, [this, method](grpc::CallbackServerContext& context) {
    return new CollectCall<Result>(method, context, frontend(), live_calls_,
                                   options_.max_answer_bytes,
                                   [this](const grpc::ByteBuffer& in, CollectCall<Result>& call) {
                                     BeginRequest<Message>(in, call);
                                   });
  });
}

Answer<v1::CancelRequestResponse> GenerationService::CancelRequest(
    const v1::CancelRequestRequest& request, const Identity& caller) {
  const absl::Status why = absl::CancelledError("cancelled by CancelRequest");
  if (Cancel(request.request_id(), request.model(), why, caller)) {
    return v1::CancelRequestResponse();
  }
  return NotFound("request", request.request_id(),
                  absl::StrCat("no request '", request.request_id(), "' is running or waiting"));
}

bool GenerationService::Cancel(const std::string& id, const std::string& model,
                               const absl::Status& why, const Identity& caller) {
  const std::string* const tenant = caller.May(Role::kOperator) ? nullptr : &caller.name;
  bool found = false;
  for (const ModelPtr& live : models_.Live()) {
    if (!model.empty() && model != live->name) continue;
    found |= live->engine->Cancel(id, why, tenant);
  }
  return found;
}

namespace {

template <typename Message>
void LogAsked(const Message& message, v1::AccessLogEntry& entry) {
  entry.set_request_id(ForLog(message.request_id()));
  entry.set_model(ForLog(message.model()));
  entry.set_policy(ForLog(message.kv().policy()));
}

}  // namespace

void GenerationService::Take(const v1::GenerateRequest& message, StreamCall& call) {
  LogAsked(message, call.scope().entry());
  Submit(message, call, /*may_wait=*/false);
}

template <typename Message, typename Call>
void GenerationService::BeginRequest(const grpc::ByteBuffer& in, Call& call) {
  CallScope& scope = call.scope();
  const std::variant<Message, grpc::Status> opened = scope.Open<Message>(in);
  if (const auto* refusal = std::get_if<grpc::Status>(&opened)) return call.Fail(*refusal);
  const Message& message = std::get<Message>(opened);
  LogAsked(message, scope.entry());
  Submit(message, call, /*may_wait=*/false);
}

void GenerationService::BeginPacket(const grpc::ByteBuffer& in, PacketCall& call) {
  CallScope& scope = call.scope();
  const auto opened = scope.Open<v1::CreatePacketRequest>(in);
  if (const auto* refusal = std::get_if<grpc::Status>(&opened)) return call.Fail(*refusal);
  const auto& message = std::get<v1::CreatePacketRequest>(opened);
  LogAsked(message.request(), scope.entry());
  call.Ask(message.soft_tokens());
  Submit(message.request(), call, /*may_wait=*/false);
}

// Before it runs: of what it can hold at most.
bool GenerationService::MakeRoom(const ServedModel& model, const Request& request,
                                 PacketCall& call) {
  v1::PacketHead head = HeadOf(model, request.scheduling.tenant);
  head.set_soft_tokens(request.soft != nullptr);
  absl::StatusOr<PacketStore::Room> room = absl::FailedPreconditionError(
      "the model file does not say which weights it holds: export it again");
  if (!head.weights().empty()) {
    room = options_.packets->Reserve(model.admission->MostPacketBytes(request));
  }
  if (room.ok()) {
    call.Expect(std::move(head), *std::move(room));
    return true;
  }
  const grpc::Status refusal = ToGrpc(room.status());
  model.metrics->OnRejected(ErrorReason(refusal));
  AddPushback(call.scope().context(), RetryAfterOf(room.status()));
  call.Fail(refusal);
  return false;
}

template <typename Message, typename Call>
void GenerationService::SubmitOncePrepared(const Message& message, Call& call) {
  CallScope& scope = call.scope();
  const std::string& client = scope.caller().name;
  if (const int64_t waiting = preparing_.Waiting(client); waiting >= options_.most_compilations) {
    metrics_.OnRejected(kQueueFull);
    AddPushback(scope.context(), kCompileRetryDelay);
    return call.Fail(Exhausted(
        "waiting preparations",
        absl::StrCat("the queue is full: ", waiting,
                     " of your requests wait for their constraints to be compiled, or ",
                     "for packets to be read; at most ", options_.most_compilations, " may wait"),
        kCompileRetryDelay));
  }
  const auto bytes = static_cast<int64_t>(message.SpaceUsedLong());
  if (const int64_t waiting = preparing_.Weighs(client);
      waiting > 0 && waiting + bytes > kMostClientBytes) {
    metrics_.OnRejected(kQueueFull);
    AddPushback(scope.context(), kCompileRetryDelay);
    return call.Fail(Exhausted(
        "waiting preparations",
        absl::StrCat("more than ", kMostClientBytes,
                     " bytes of your requests wait for their constraints to be compiled, ",
                     "or for packets to be read"),
        kCompileRetryDelay));
  }
  preparing_.Post(client, bytes, [this, &call, message] {
    if (call.scope().context().IsCancelled()) {
      return call.Fail(ToGrpc(WhyCancelledNow(call.scope())));
    }
    Submit(message, call, /*may_wait=*/true);
  });
}

template <typename Message, typename Call>
void GenerationService::Submit(const Message& message, Call& call, bool may_wait) {
  CallScope& scope = call.scope();
  for (;;) {
    std::variant<ModelPtr, grpc::Status> found = models_.Find(message.model());
    if (const auto* refusal = std::get_if<grpc::Status>(&found)) {
      metrics_.OnRejected(ErrorReason(*refusal));
      return call.Fail(*refusal);
    }
    const ModelPtr model = std::get<ModelPtr>(std::move(found));
    RequestPreparer::Result prepared =
        preparer_.Prepare(scope, message, *model, may_wait, call.asked());
    if (const auto* status = std::get_if<grpc::Status>(&prepared)) return call.Fail(*status);
    if (std::holds_alternative<RequestPreparer::MustWait>(prepared)) {
      return SubmitOncePrepared(message, call);
    }
    Prepared& ready = std::get<Prepared>(prepared);
    if constexpr (std::is_same_v<Call, PacketCall>) {
      if (!MakeRoom(*model, ready.request, call)) return;
    }
    const std::string id = ready.request.id;
    CallFacts facts{
        .outbox = std::make_shared<Outbox>(options_.outbox, HooksOf(model, ready, scope.entry()),
                                           ready.deltas, call, courier_),
        .accepted = AcceptedOf(ready, model->name),
        .lanes = model->lanes()};
    LogAccepted(facts.accepted, scope.entry());
    scope.entry().set_operation(std::string(OperationOf(ready.request)));
    const std::shared_ptr<Outbox> outbox = facts.outbox;
    const SubmitResult submitted = model->engine->Submit(std::move(ready.request), outbox);
    // It went out of service meanwhile: who serves its name now may take the request.
    if (submitted.error == SubmitError::kDraining && models_.Replaced(*model)) continue;
    if (submitted.error != SubmitError::kNone) {
      return call.Fail(RefusalOf(scope, submitted, id, *model));
    }
    // Nothing calls `call` before Open but OnCancel, which may have come too soon.
    SetPredictedWait(submitted.forecast, facts.accepted);
    call.Start(std::move(facts));
    if (scope.context().IsCancelled()) outbox->OnClientGone(WhyCancelledNow(scope));
    return outbox->Open({.position = static_cast<int64_t>(submitted.forecast.position)});
  }
}

// Outboxes do not keep their model: the engine, which drops them last, cannot end on its own
// thread.
OutboxHooks GenerationService::HooksOf(const ModelPtr& served, const Prepared& prepared,
                                       v1::AccessLogEntry& entry) {
  const std::weak_ptr<const ServedModel> model = served;
  const std::string& request_id = prepared.request.id;
  std::shared_ptr<Shadow::Tap> tap;
  // A replay would have to hold packets that may have been deleted.
  if (options_.shadow != nullptr && prepared.began.has_value() &&
      prepared.request.packets.empty() && prepared.request.soft == nullptr) {
    tap = options_.shadow->Follow(*prepared.began, served, prepared.request, prepared.hidden);
  }
  std::function<void(const Delta&)> on_delta;
  if (tap != nullptr) on_delta = [tap](const Delta& delta) { tap->OnDelta(delta); };
  return {.wake_engine =
              [model] {
                if (const ModelPtr live = model.lock()) live->engine->Wake();
              },
          .cancel_request =
              [model, request_id](const RequestSink& sink, absl::Status status) {
                const ModelPtr live = model.lock();
                if (live != nullptr) live->engine->CancelOf(sink, request_id, std::move(status));
              },
          .was_full = [this](absl::Duration full) { metrics_.OnStreamWasFull(full); },
          .delta = std::move(on_delta),
          .finished =
              [&entry, lanes = served->lanes(), tap, session = prepared.session, model,
               sessions = options_.sessions](const Finished& finished) {
                LogFinished(finished, lanes, entry);
                if (tap != nullptr) tap->OnFinished(finished);
                if (session == nullptr || !finished.status.ok()) return;
                sessions->Extend(session->name, model, session->tokens);
              }};
}

grpc::Status GenerationService::RefusalOf(CallScope& scope, const SubmitResult& submitted,
                                          const std::string& request_id, const ServedModel& model) {
  AddPushback(scope.context(), submitted.retry_after);
  switch (submitted.error) {
    case SubmitError::kDuplicateId:
      model.metrics->OnRejected(kDuplicateId);
      return AlreadyExists("request", request_id,
                           absl::StrCat("another request with the id '", request_id,
                                        "' is still running or waiting"));
    case SubmitError::kDraining:
      model.metrics->OnRejected(kDraining);
      return Unavailable(kDraining, "the server takes no new requests; try another one",
                         kDrainRetryDelay);
    case SubmitError::kDeadlineInfeasible:
      model.metrics->OnRejected(kDeadlineInfeasible);
      return DeadlineInfeasible({.left = scope.deadline() - SteadyNow(),
                                 .wait = submitted.forecast.least_wait,
                                 .run = submitted.forecast.least_run},
                                submitted.retry_after);
    case SubmitError::kQueueFull:
    case SubmitError::kNone:
      break;
  }
  model.metrics->OnRejected(kQueueFull);
  if (submitted.full == SubmitResult::Full::kTokens) {
    return Exhausted(
        "waiting tokens",
        absl::StrCat("the queue is full: requests with ", submitted.waiting_tokens,
                     " tokens are waiting; at most ", submitted.limit, " tokens may wait"),
        *submitted.retry_after);
  }
  return Exhausted("waiting requests",
                   absl::StrCat("the queue is full: ", submitted.waiting,
                                " requests are waiting; at most ", submitted.limit, " may wait"),
                   *submitted.retry_after);
}

}  // namespace epikv
