#include "server/generation_service.h"

#include <algorithm>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "runtime/reason.h"
#include "server/errors.h"
#include "server/rpc.h"
#include "server/wire.h"

namespace epikv {
namespace {

// By then another replica takes what this one, which is draining, refuses.
constexpr absl::Duration kDrainRetryDelay = absl::Seconds(1);

absl::Time DeadlineOf(const grpc::CallbackServerContext& context) {
  const auto deadline = context.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return absl::InfiniteFuture();
  return absl::FromChrono(deadline);
}

// What every call is part of.
struct CallScope {
  CallScope(grpc::CallbackServerContext& c, Metrics& m, LiveCalls& l)
      : context(c), metrics(m), live(l) {
    live.Add(1);
  }
  ~CallScope() { live.Add(-1); }

  grpc::CallbackServerContext& context;
  Metrics& metrics;
  LiveCalls& live;
  const absl::Time start = absl::Now();
};

// What a call knows of its request once it is queued.
struct CallFacts {
  std::shared_ptr<Outbox> outbox;  // shared with the engine, which may end later or sooner
  v1::Accepted accepted;
  int64_t lanes = 0;
};

absl::Status WhyCancelledNow(const CallScope& scope) {
  return WhyCancelled(
      {.start = scope.start, .deadline = DeadlineOf(scope.context), .now = absl::Now()});
}

// Deletes itself in OnDone, which comes after End: the outbox, and through it the engine, reaches
// the call only before.
class StreamCall final : public grpc::ServerWriteReactor<grpc::ByteBuffer>, public StreamWriter {
 public:
  StreamCall(grpc::CallbackServerContext& context, Metrics& metrics, LiveCalls& live)
      : scope_(context, metrics, live) {}

  void Start(CallFacts facts) { facts_ = std::move(facts); }
  void Fail(const grpc::Status& status) {
    scope_.metrics.OnRpcFinished("GenerationService/Generate", status.error_code());
    Finish(status);
  }

  void Send(OutboxMessage message) override {
    message_ = Serialize(std::visit([this](auto& part) { return ResponseOf(part); }, message));
    StartWrite(&message_);
  }
  void Abort() override { scope_.context.TryCancel(); }
  void End(const absl::Status& status) override { Fail(ToGrpc(status)); }

  void OnWriteDone(bool ok) override {
    // It may come before OnCancel, and the outbox cannot know why it failed.
    if (!ok) facts_.outbox->OnClientGone(WhyCancelledNow(scope_));
    facts_.outbox->OnWritten(ok);
  }
  void OnCancel() override {
    if (facts_.outbox != nullptr) facts_.outbox->OnClientGone(WhyCancelledNow(scope_));
  }
  void OnDone() override { delete this; }

 private:
  v1::GenerateResponse ResponseOf(const Queued& queued) const {
    v1::GenerateResponse response;
    *response.mutable_accepted() = facts_.accepted;
    response.mutable_accepted()->set_queue_position(queued.position);
    return response;
  }
  static v1::GenerateResponse ResponseOf(const Delta& delta) {
    v1::GenerateResponse response;
    *response.mutable_delta() = ToProto(delta);
    return response;
  }
  static v1::GenerateResponse ResponseOf(const EvictionTrace& trace) {
    v1::GenerateResponse response;
    *response.mutable_eviction() = ToProto(trace);
    return response;
  }
  v1::GenerateResponse ResponseOf(const Finished& finished) const {
    v1::GenerateResponse response;
    *response.mutable_summary() = SummaryOf(facts_.accepted, finished, facts_.lanes);
    return response;
  }

  const CallScope scope_;
  CallFacts facts_;
  grpc::ByteBuffer message_;  // gRPC's until OnWriteDone
};

void AddText(v1::GenerateResult& result, const Delta& delta) {
  result.mutable_text()->append(delta.text);
}
void AddText(v1::ScoreResponse& result, const Delta& delta) {
  result.mutable_greedy()->Add(delta.greedy.begin(), delta.greedy.end());
}

// Collects the messages of a stream into one result. Deletes itself as StreamCall does.
template <typename Result>
class CollectCall final : public grpc::ServerUnaryReactor, public StreamWriter {
 public:
  CollectCall(absl::string_view method, grpc::ByteBuffer& out, grpc::CallbackServerContext& context,
              Metrics& metrics, LiveCalls& live)
      : method_(method), out_(out), scope_(context, metrics, live) {}

  void Start(CallFacts facts) {
    facts_ = std::move(facts);
    *result_.mutable_accepted() = facts_.accepted;
  }
  void Fail(const grpc::Status& status) {
    scope_.metrics.OnRpcFinished(method_, status.error_code());
    Finish(status);
  }

  void Send(OutboxMessage message) override {
    std::visit([this](auto& part) { Collect(part); }, message);
    facts_.outbox->OnWritten(true);
  }
  void Abort() override {}  // no write takes time
  void End(const absl::Status& status) override {
    if (status.ok()) out_ = Serialize(result_);
    Fail(ToGrpc(status));
  }

  void OnCancel() override {
    if (facts_.outbox != nullptr) facts_.outbox->OnClientGone(WhyCancelledNow(scope_));
  }
  void OnDone() override { delete this; }

 private:
  void Collect(const Queued& queued) {
    result_.mutable_accepted()->set_queue_position(queued.position);
  }
  void Collect(const Delta& delta) {
    v1::Delta proto = ToProto(delta);
    result_.mutable_token_ids()->MergeFrom(proto.token_ids());
    result_.mutable_logprobs()->MergeFrom(proto.logprobs());
    result_.mutable_signals()->MergeFrom(proto.signals());
    AddText(result_, delta);
  }
  void Collect(const EvictionTrace& trace) { *result_.add_evictions() = ToProto(trace); }
  void Collect(const Finished& finished) {
    *result_.mutable_summary() = SummaryOf(facts_.accepted, finished, facts_.lanes);
  }

  const absl::string_view method_;
  grpc::ByteBuffer& out_;
  const CallScope scope_;
  CallFacts facts_;
  Result result_;
};

}  // namespace

absl::Status WhyCancelled(const CallTimes& times) {
  constexpr absl::Duration kMostEarly = absl::Milliseconds(250);
  const absl::Duration rounded = (times.deadline - times.start) / 100 + absl::Milliseconds(10);
  if (times.deadline - std::min(rounded, kMostEarly) <= times.now) {
    return absl::DeadlineExceededError("the deadline has passed");
  }
  return absl::CancelledError("the client has gone");
}

GenerationService::GenerationService(const ServedModel& model, EngineThread& engine,
                                     Courier& courier, Metrics& metrics, OutboxLimits outbox_limits)
    : model_(model),
      engine_(engine),
      courier_(courier),
      metrics_(metrics),
      outbox_limits_(outbox_limits),
      lanes_(model.admission.shape().num_layers * model.admission.shape().num_kv_heads),
      id_prefix_(absl::StrCat(absl::Hex(absl::Uniform<uint64_t>(absl::BitGen())))) {}

grpc::ServerWriteReactor<grpc::ByteBuffer>* GenerationService::Generate(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* in) {
  auto* call = new StreamCall(*context, metrics_, live_calls_);
  Begin<v1::GenerateRequest>(*context, *in, *call);
  return call;
}

grpc::ServerUnaryReactor* GenerationService::GenerateOnce(grpc::CallbackServerContext* context,
                                                          const grpc::ByteBuffer* in,
                                                          grpc::ByteBuffer* out) {
  auto* call = new CollectCall<v1::GenerateResult>("GenerationService/GenerateOnce", *out, *context,
                                                   metrics_, live_calls_);
  Begin<v1::GenerateRequest>(*context, *in, *call);
  return call;
}

grpc::ServerUnaryReactor* GenerationService::Score(grpc::CallbackServerContext* context,
                                                   const grpc::ByteBuffer* in,
                                                   grpc::ByteBuffer* out) {
  auto* call = new CollectCall<v1::ScoreResponse>("GenerationService/Score", *out, *context,
                                                  metrics_, live_calls_);
  Begin<v1::ScoreRequest>(*context, *in, *call);
  return call;
}

grpc::ServerUnaryReactor* GenerationService::CancelRequest(grpc::CallbackServerContext* context,
                                                           const grpc::ByteBuffer* in,
                                                           grpc::ByteBuffer* out) {
  auto cancel =
      [this](const v1::CancelRequestRequest& request) -> Answer<v1::CancelRequestResponse> {
    if (engine_.Cancel(request.request_id(), absl::CancelledError("cancelled by CancelRequest"))) {
      return v1::CancelRequestResponse();
    }
    return NotFound("request", request.request_id(),
                    absl::StrCat("no request '", request.request_id(), "' is live"));
  };
  return AnswerAtOnce<v1::CancelRequestRequest>("GenerationService/CancelRequest", metrics_,
                                                *context, *in, *out, cancel);
}

template <typename Message, typename Call>
void GenerationService::Begin(grpc::CallbackServerContext& context, const grpc::ByteBuffer& in,
                              Call& call) {
  std::variant<Prepared, grpc::Status> prepared = Prepare<Message>(context, in);
  if (const auto* status = std::get_if<grpc::Status>(&prepared)) return call.Fail(*status);
  Prepared& ready = std::get<Prepared>(prepared);
  const std::string id = ready.request.id;
  CallFacts facts{.outbox = std::make_shared<Outbox>(outbox_limits_, HooksOf(id), ready.token_ids,
                                                     call, courier_),
                  .accepted = AcceptedOf(ready, model_.name),
                  .lanes = lanes_};
  const std::shared_ptr<Outbox> outbox = facts.outbox;
  const SubmitResult submitted = engine_.Submit(std::move(ready.request), outbox);
  if (submitted.error != SubmitError::kNone) return call.Fail(RefusalOf(context, submitted, id));
  // Nothing calls `call` before Open, nor cancels it before this method has returned.
  SetPredictedWait(submitted.forecast, facts.accepted);
  call.Start(std::move(facts));
  outbox->Open({.position = static_cast<int64_t>(submitted.forecast.position)});
}

template <typename Message>
std::variant<Prepared, grpc::Status> GenerationService::Prepare(
    grpc::CallbackServerContext& context, const grpc::ByteBuffer& in) {
  auto reject = [this](const Rejection& rejection) {
    metrics_.OnRejected(rejection.reason);
    return ToGrpc(rejection);
  };
  const absl::Time arrival = absl::Now();
  std::variant<Message, Rejection> parsed = Parse<Message>(in);
  if (const auto* rejection = std::get_if<Rejection>(&parsed)) return reject(*rejection);
  const Message& message = std::get<Message>(parsed);
  if (std::optional<grpc::Status> refusal = model_.Refuse(message.model())) {
    metrics_.OnRejected(kNotFound);
    return *refusal;
  }
  AskedRequest asked = FromProto(message, model_.tokenizer);
  if (asked.options.id.empty()) asked.options.id = NewRequestId();
  if (!asked.has_seed) asked.options.sampling.seed = absl::Uniform<uint64_t>(absl::BitGen());
  asked.options.arrival = arrival;
  asked.options.deadline = DeadlineOf(context);
  const bool token_ids = asked.token_ids;
  std::variant<Request, Rejection> resolved = Resolve(std::move(asked), model_.admission);
  if (const auto* rejection = std::get_if<Rejection>(&resolved)) return reject(*rejection);
  return Prepared{.request = std::get<Request>(std::move(resolved)), .token_ids = token_ids};
}

OutboxHooks GenerationService::HooksOf(const std::string& request_id) {
  return {.wake_engine = [this] { engine_.Wake(); },
          .cancel_request =
              [this, request_id](const RequestSink& sink, absl::Status status) {
                engine_.CancelOf(sink, request_id, std::move(status));
              },
          .was_full = [this](absl::Duration full) { metrics_.OnStreamWasFull(full); }};
}

grpc::Status GenerationService::RefusalOf(grpc::CallbackServerContext& context,
                                          const SubmitResult& submitted,
                                          const std::string& request_id) {
  if (submitted.retry_after.has_value()) {  // for the retries of gRPC's own clients
    context.AddTrailingMetadata("grpc-retry-pushback-ms",
                                absl::StrCat(absl::ToInt64Milliseconds(*submitted.retry_after)));
  }
  switch (submitted.error) {
    case SubmitError::kDuplicateId:
      metrics_.OnRejected(kDuplicateId);
      return AlreadyExists("request", request_id,
                           absl::StrCat("a request '", request_id, "' is live"));
    case SubmitError::kDraining:
      metrics_.OnRejected(kDraining);
      return Unavailable(kDraining, "the server is shutting down; try another one",
                         kDrainRetryDelay);
    case SubmitError::kDeadlineInfeasible:
      metrics_.OnRejected(kDeadlineInfeasible);
      return DeadlineInfeasible({.left = DeadlineOf(context) - absl::Now(),
                                 .wait = submitted.forecast.least_wait,
                                 .run = submitted.forecast.least_run},
                                submitted.retry_after);
    case SubmitError::kQueueFull:
    case SubmitError::kNone:
      break;
  }
  metrics_.OnRejected(kQueueFull);
  return Exhausted("waiting requests",
                   absl::StrCat("the queue is full: ", submitted.waiting, " requests are waiting"),
                   *submitted.retry_after);
}

std::string GenerationService::NewRequestId() {
  return absl::StrCat(id_prefix_, "-", next_id_.fetch_add(1));
}

}  // namespace epikv
