#include "server/generation/generation_service.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <optional>
#include <type_traits>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "runtime/base/reason.h"
#include "server/base/durations.h"
#include "server/base/errors.h"
#include "server/metrics/request_series.h"
#include "server/call/rpc.h"
#include "server/call/wire.h"

namespace epikv {
namespace {

// After which a compilation, or some, will have come to its end.
constexpr absl::Duration kCompileRetryDelay = absl::Seconds(1);

absl::Time DeadlineOf(const grpc::CallbackServerContext& context) {
  const auto deadline = context.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return absl::InfiniteFuture();
  return absl::FromChrono(deadline);
}

// Counts a call while it lives.
class LiveCall {
 public:
  explicit LiveCall(LiveCalls& live) : live_(live) { live_.Add(1); }
  ~LiveCall() { live_.Add(-1); }

 private:
  LiveCalls& live_;
};

// What a call knows of its request once it is queued.
struct CallFacts {
  std::shared_ptr<Outbox> outbox;  // shared with the engine, which may end later or sooner
  v1::Accepted accepted;
  int64_t lanes = 0;
};

// Who has a token is the tenant of his own requests; an operator may speak for others. Without
// tokens everyone is who he says.
std::optional<grpc::Status> SettleTenant(const Identity& caller, std::string& tenant) {
  if (caller.name.empty() || tenant == caller.name) return std::nullopt;
  if (tenant.empty()) {
    tenant = caller.name;
    return std::nullopt;
  }
  if (caller.May(Role::kOperator)) return std::nullopt;
  return PermissionDenied(
      absl::StrCat("scheduling.tenant '", tenant, "' of caller '", caller.name, "'"),
      RoleName(Role::kOperator));
}

// Nobody can guess it: who did would keep another's request out by a duplicate.
std::string NewRequestId() {
  absl::BitGen random;
  return absl::StrCat(absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16),
                      absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16));
}

absl::Status WhyCancelledNow(const CallScope& scope) {
  return WhyCancelled(
      {.start = scope.start(), .deadline = DeadlineOf(scope.context()), .now = absl::Now()});
}

// Whether other options for its KV cache could have been accepted.
bool ConcernsKv(const Rejection& rejection) {
  constexpr absl::string_view kReasons[] = {"KV_BUDGET", "KV_POOL_TOO_SMALL", "ARTEFACT_MISSING",
                                            "PROMPT_EVICTED", "SPAN_RANGE"};
  return std::find(std::begin(kReasons), std::end(kReasons), rejection.reason) !=
             std::end(kReasons) ||
         std::any_of(rejection.violations.begin(), rejection.violations.end(),
                     [](const FieldViolation& violation) {
                       return absl::StartsWith(violation.field, "kv.");
                     });
}

// Compiles what the text has to be. A text that is no constraint is a violation beside others.
std::optional<grpc::Status> Constrain(const v1::GenerateRequest& message, const ServedModel& model,
                                      AskedRequest& asked) {
  const std::optional<ConstraintText> text = ConstraintOf(message.sampling());
  if (!text.has_value()) return std::nullopt;
  auto constraint = model.constraints->Compile(*text);
  if (constraint.ok()) {
    asked.options.sampling.constraint = *std::move(constraint);
  } else if (absl::IsInvalidArgument(constraint.status())) {
    asked.violations.push_back(
        {ConstraintField(*text), std::string(constraint.status().message())});
  } else if (absl::IsResourceExhausted(constraint.status())) {
    return Exhausted("memory of constraints", constraint.status().message(), kCompileRetryDelay);
  } else {
    return ToGrpc(constraint.status());
  }
  return std::nullopt;
}

// A stream's messages are smaller than its outbox; a result may be of any size.
grpc::Status AnswerTooLarge(int64_t bytes, int64_t limit) {
  return ToGrpc(Rejection{
      .code = absl::StatusCode::kResourceExhausted,
      .reason = "ANSWER_TOO_LARGE",
      .message = absl::StrCat("the answer has ", bytes, " bytes and --max_sent_message_bytes is ",
                              limit, "; Generate streams it in parts"),
      .metadata = {{"limit", absl::StrCat(limit)}, {"bytes", absl::StrCat(bytes)}}});
}

void Log(const v1::Accepted& accepted, v1::AccessLogEntry& entry) {
  entry.set_request_id(ForLog(accepted.request_id()));
  entry.set_model(ForLog(accepted.model()));
  entry.set_policy(accepted.kv().policy());
  entry.set_budget_tokens(accepted.kv().budget_tokens());
  entry.set_prompt_tokens(accepted.prompt_tokens());
  if (accepted.arm() != kNoArm) entry.set_arm(accepted.arm());
}

void Log(const Finished& finished, int64_t lanes, v1::AccessLogEntry& entry) {
  const Timings& timings = finished.timings;
  entry.set_finish_reason(std::string(FinishLabel(finished)));
  entry.set_cached_prompt_tokens(finished.cached_prompt_tokens);
  entry.set_output_tokens(finished.output_tokens);
  entry.set_evicted_tokens(finished.kv.evicted_entries / lanes);
  entry.set_rounds(finished.kv.rounds);
  entry.set_peak_tokens((finished.kv.peak_entries + lanes - 1) / lanes);
  entry.set_queue_seconds(absl::ToDoubleSeconds(timings.queue));
  entry.set_prefill_seconds(absl::ToDoubleSeconds(timings.prefill));
  entry.set_ttft_seconds(absl::ToDoubleSeconds(timings.time_to_first_token));
  entry.set_decode_seconds(absl::ToDoubleSeconds(timings.decode));
}

// For the retries of gRPC's own clients.
void AddPushback(grpc::CallbackServerContext& context, std::optional<absl::Duration> retry_after) {
  if (!retry_after.has_value()) return;
  context.AddTrailingMetadata("grpc-retry-pushback-ms",
                              absl::StrCat(absl::ToInt64Milliseconds(*retry_after)));
}

// Deletes itself in OnDone, which comes after End: the outbox, and through it the engine, reaches
// the call only before.
class StreamCall final : public grpc::ServerWriteReactor<grpc::ByteBuffer>, public StreamWriter {
 public:
  StreamCall(grpc::CallbackServerContext& context, const Frontend& frontend, LiveCalls& live)
      : live_(live), scope_("GenerationService/Generate", frontend, context) {}

  CallScope& scope() { return scope_; }
  void Start(CallFacts facts) {
    facts_ = std::move(facts);
    started_ = true;
  }
  void Fail(const grpc::Status& status) { Finish(scope_.Close(status)); }

  void Send(OutboxMessage message) override {
    message_ = Serialize(std::visit([this](auto& part) { return ResponseOf(part); }, message));
    StartWrite(&message_);
  }
  void Abort() override { scope_.context().TryCancel(); }
  void End(const absl::Status& status) override {
    AddPushback(scope_.context(), RetryAfterOf(status));
    Fail(ToGrpc(status));
  }

  void OnWriteDone(bool ok) override {
    // It may come before OnCancel, and the outbox cannot know why it failed.
    if (!ok) facts_.outbox->OnClientGone(WhyCancelledNow(scope_));
    facts_.outbox->OnWritten(ok);
  }
  void OnCancel() override {
    if (started_) facts_.outbox->OnClientGone(WhyCancelledNow(scope_));
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
  static v1::GenerateResponse ResponseOf(const PromptProgress& progress) {
    v1::GenerateResponse response;
    *response.mutable_progress() = ToProto(progress);
    return response;
  }
  static v1::GenerateResponse ResponseOf(const PromptLogprobs& prompt) {
    v1::GenerateResponse response;
    *response.mutable_prompt_logprobs() = ToProto(prompt);
    return response;
  }
  v1::GenerateResponse ResponseOf(const CompletionEnd& end) const {
    v1::GenerateResponse response;
    *response.mutable_finished() = FinishedOf(facts_.accepted, end, facts_.lanes);
    return response;
  }
  v1::GenerateResponse ResponseOf(const Finished& finished) const {
    v1::GenerateResponse response;
    *response.mutable_summary() = SummaryOf(facts_.accepted, finished, facts_.lanes);
    return response;
  }

  const LiveCall live_;
  CallScope scope_;
  CallFacts facts_;
  std::atomic<bool> started_ = false;  // facts_ are there
  grpc::ByteBuffer message_;           // gRPC's until OnWriteDone
};

// Where a completion's output goes: into the result, or, of several, into its own place in it.
template <typename Use>
void WithOutput(v1::GenerateResult& result, int64_t completion, const Use& use) {
  const int64_t n = result.accepted().sampling().n();
  if (n <= 1) return use(result);
  while (result.completions_size() < n) result.add_completions();
  use(*result.mutable_completions(static_cast<int>(completion)));
}
template <typename Use>
void WithOutput(v1::ScoreResponse& result, int64_t, const Use& use) {
  use(result);
}

void AddEnd(v1::GenerateResult& result, const v1::Finished& finished) {
  WithOutput(result, finished.completion(), [&](auto& output) {
    if constexpr (requires { output.mutable_finished(); }) *output.mutable_finished() = finished;
  });
}
void AddEnd(v1::ScoreResponse&, const v1::Finished&) {}  // scores have one

template <typename Output>
void AddText(Output& output, const Delta& delta) {
  output.mutable_text()->append(delta.text);
}
void AddText(v1::ScoreResponse& result, const Delta& delta) {
  result.mutable_greedy()->Add(delta.greedy.begin(), delta.greedy.end());
}

void AddPrompt(v1::GenerateResult& result, const PromptLogprobs& prompt) {
  v1::PromptLogprobs proto = ToProto(prompt);
  if (result.has_prompt_logprobs()) proto.clear_first();  // that of the first part stays
  result.mutable_prompt_logprobs()->MergeFrom(proto);
}
void AddPrompt(v1::ScoreResponse&, const PromptLogprobs&) {}  // cannot be asked for

// Collects the messages of a stream into one result. Deletes itself as StreamCall does.
template <typename Result>
class CollectCall final : public grpc::ServerUnaryReactor, public StreamWriter {
 public:
  CollectCall(absl::string_view method, grpc::ByteBuffer& out, grpc::CallbackServerContext& context,
              const Frontend& frontend, LiveCalls& live, int64_t max_bytes)
      : out_(out), max_bytes_(max_bytes), live_(live), scope_(method, frontend, context) {}

  CallScope& scope() { return scope_; }
  void Start(CallFacts facts) {
    facts_ = std::move(facts);
    *result_.mutable_accepted() = facts_.accepted;
    started_ = true;
  }
  void Fail(const grpc::Status& status) { Finish(scope_.Close(status)); }

  void Send(OutboxMessage message) override {
    std::visit([this](auto& part) { Collect(part); }, message);
    facts_.outbox->OnWritten(true);
  }
  void Abort() override {}  // no write takes time
  void End(const absl::Status& status) override {
    AddPushback(scope_.context(), RetryAfterOf(status));
    if (!status.ok()) return Fail(ToGrpc(status));
    const auto bytes = static_cast<int64_t>(result_.ByteSizeLong());
    if (bytes > max_bytes_) return Fail(AnswerTooLarge(bytes, max_bytes_));
    out_ = Serialize(result_);
    Fail(grpc::Status::OK);
  }

  void OnCancel() override {
    if (started_) facts_.outbox->OnClientGone(WhyCancelledNow(scope_));
  }
  void OnDone() override { delete this; }

 private:
  void Collect(const Queued& queued) {
    result_.mutable_accepted()->set_queue_position(queued.position);
  }
  void Collect(const Delta& delta) {
    const v1::Delta proto = ToProto(delta);
    WithOutput(result_, delta.completion, [&](auto& output) {
      output.mutable_token_ids()->MergeFrom(proto.token_ids());
      output.mutable_logprobs()->MergeFrom(proto.logprobs());
      output.mutable_signals()->MergeFrom(proto.signals());
      output.mutable_top_logprobs()->MergeFrom(proto.top_logprobs());
      AddText(output, delta);
    });
  }
  void Collect(const PromptProgress&) {}  // nobody sees it pass
  void Collect(const PromptLogprobs& prompt) { AddPrompt(result_, prompt); }
  void Collect(const EvictionTrace& trace) {
    WithOutput(result_, trace.completion,
               [&](auto& output) { *output.add_evictions() = ToProto(trace); });
  }
  void Collect(const CompletionEnd& end) {
    AddEnd(result_, FinishedOf(facts_.accepted, end, facts_.lanes));
  }
  void Collect(const Finished& finished) {
    *result_.mutable_summary() = SummaryOf(facts_.accepted, finished, facts_.lanes);
  }

  grpc::ByteBuffer& out_;
  const int64_t max_bytes_;
  const LiveCall live_;
  CallScope scope_;
  CallFacts facts_;
  std::atomic<bool> started_ = false;  // facts_ are there
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

GenerationService::GenerationService(const Models& models, Courier& courier,
                                     const Frontend& frontend, const GenerationOptions& options)
    : models_(models),
      courier_(courier),
      frontend_(frontend),
      metrics_(frontend.metrics),
      options_(options) {}

grpc::ServerWriteReactor<grpc::ByteBuffer>* GenerationService::Generate(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* in) {
  auto* call = new StreamCall(*context, frontend_, live_calls_);
  Begin<v1::GenerateRequest>(*in, *call);
  return call;
}

grpc::ServerUnaryReactor* GenerationService::GenerateOnce(grpc::CallbackServerContext* context,
                                                          const grpc::ByteBuffer* in,
                                                          grpc::ByteBuffer* out) {
  auto* call =
      new CollectCall<v1::GenerateResult>("GenerationService/GenerateOnce", *out, *context,
                                          frontend_, live_calls_, options_.max_answer_bytes);
  Begin<v1::GenerateRequest>(*in, *call);
  return call;
}

grpc::ServerUnaryReactor* GenerationService::Score(grpc::CallbackServerContext* context,
                                                   const grpc::ByteBuffer* in,
                                                   grpc::ByteBuffer* out) {
  auto* call = new CollectCall<v1::ScoreResponse>(
      "GenerationService/Score", *out, *context, frontend_, live_calls_, options_.max_answer_bytes);
  Begin<v1::ScoreRequest>(*in, *call);
  return call;
}

grpc::ServerUnaryReactor* GenerationService::CancelRequest(grpc::CallbackServerContext* context,
                                                           const grpc::ByteBuffer* in,
                                                           grpc::ByteBuffer* out) {
  auto cancel = [this](const v1::CancelRequestRequest& request,
                       const Identity& caller) -> Answer<v1::CancelRequestResponse> {
    const std::string* const tenant = caller.May(Role::kOperator) ? nullptr : &caller.name;
    bool found = false;
    for (const ModelPtr& model : models_.Live()) {
      if (!request.model().empty() && request.model() != model->name) continue;
      found |= model->engine->Cancel(request.request_id(),
                                     absl::CancelledError("cancelled by CancelRequest"), tenant);
    }
    if (found) return v1::CancelRequestResponse();
    return NotFound("request", request.request_id(),
                    absl::StrCat("no request '", request.request_id(), "' is live"));
  };
  return AnswerAtOnce<v1::CancelRequestRequest>("GenerationService/CancelRequest", frontend_,
                                                *context, *in, *out, cancel);
}

template <typename Message, typename Call>
void GenerationService::Begin(const grpc::ByteBuffer& in, Call& call) {
  CallScope& scope = call.scope();
  const std::variant<Message, grpc::Status> opened = scope.Open<Message>(in);
  if (const auto* refusal = std::get_if<grpc::Status>(&opened)) return call.Fail(*refusal);
  const Message& message = std::get<Message>(opened);
  scope.entry().set_request_id(ForLog(message.request_id()));
  scope.entry().set_model(ForLog(message.model()));
  scope.entry().set_policy(ForLog(message.kv().policy()));
  if (!MustCompile(message)) return Submit(message, call);
  // gRPC has two threads for all calls.
  const std::string& client = scope.caller().name;
  if (const int64_t waiting = compiling_.Waiting(client); waiting >= options_.most_compilations) {
    metrics_.OnRejected(kQueueFull);
    AddPushback(scope.context(), kCompileRetryDelay);
    return call.Fail(
        Exhausted("waiting compilations",
                  absl::StrCat("the queue is full: ", waiting,
                               " of your requests wait for their constraints ",
                               "to be compiled, and ", options_.most_compilations, " may"),
                  kCompileRetryDelay));
  }
  compiling_.Post(client, [this, &call, message] {
    if (call.scope().context().IsCancelled()) {
      return call.Fail(ToGrpc(WhyCancelledNow(call.scope())));
    }
    Submit(message, call);
  });
}

bool GenerationService::MustCompile(const v1::GenerateRequest& message) const {
  const std::optional<ConstraintText> text = ConstraintOf(message.sampling());
  if (!text.has_value()) return false;
  const auto found = models_.Find(message.model());
  const auto* model = std::get_if<ModelPtr>(&found);
  return model != nullptr && !(*model)->constraints->Remembers(*text);
}

template <typename Message, typename Call>
void GenerationService::Submit(const Message& message, Call& call) {
  CallScope& scope = call.scope();
  for (;;) {
    std::variant<ModelPtr, grpc::Status> found = models_.Find(message.model());
    if (const auto* refusal = std::get_if<grpc::Status>(&found)) {
      metrics_.OnRejected(ErrorReason(*refusal));
      return call.Fail(*refusal);
    }
    const ModelPtr model = std::get<ModelPtr>(std::move(found));
    std::variant<Prepared, grpc::Status> prepared = Prepare<Message>(scope, message, *model);
    if (const auto* status = std::get_if<grpc::Status>(&prepared)) return call.Fail(*status);
    Prepared& ready = std::get<Prepared>(prepared);
    const std::string id = ready.request.id;
    CallFacts facts{
        .outbox = std::make_shared<Outbox>(options_.outbox, HooksOf(model, ready, scope.entry()),
                                           ready.deltas, call, courier_),
        .accepted = AcceptedOf(ready, model->name),
        .lanes = model->lanes()};
    Log(facts.accepted, scope.entry());
    const std::shared_ptr<Outbox> outbox = facts.outbox;
    const SubmitResult submitted = model->engine->Submit(std::move(ready.request), outbox);
    // It went out of service meanwhile: who serves its name now may take the request.
    if (submitted.error == SubmitError::kDraining && models_.Replaced(*model)) continue;
    if (submitted.error != SubmitError::kNone) {
      return call.Fail(RefusalOf(scope.context(), submitted, id, *model));
    }
    // Nothing calls `call` before Open but OnCancel, which may have come too soon.
    SetPredictedWait(submitted.forecast, facts.accepted);
    call.Start(std::move(facts));
    if (scope.context().IsCancelled()) outbox->OnClientGone(WhyCancelledNow(scope));
    return outbox->Open({.position = static_cast<int64_t>(submitted.forecast.position)});
  }
}

template <typename Message>
std::variant<Prepared, grpc::Status> GenerationService::Prepare(CallScope& scope,
                                                                const Message& message,
                                                                const ServedModel& model) {
  AskedRequest asked = FromProto(message, {.tokenizer = *model.tokenizer, .chat = model.chat});
  if (asked.options.id.empty()) asked.options.id = NewRequestId();
  if (!asked.has_seed) asked.options.sampling.seed = absl::Uniform<uint64_t>(absl::BitGen());
  std::string& tenant = asked.options.scheduling.tenant;
  if (std::optional<grpc::Status> refusal = SettleTenant(scope.caller(), tenant)) {
    model.metrics->OnRejected(kPermissionDenied);
    return *std::move(refusal);
  }
  scope.entry().set_tenant(ForLog(tenant));
  asked.options.arrival = scope.start();
  asked.options.deadline = DeadlineOf(scope.context());
  Dealt dealt;
  if constexpr (std::is_same_v<Message, v1::GenerateRequest>) {
    auto result = Deal(scope, message, model, asked);
    if (auto* refusal = std::get_if<grpc::Status>(&result)) {
      model.metrics->OnRejected(kPermissionDenied);
      return std::move(*refusal);
    }
    dealt = std::get<Dealt>(std::move(result));
    if (std::optional<grpc::Status> refusal = Constrain(message, model, asked)) {
      model.metrics->OnRejected(ErrorReason(*refusal));
      return *std::move(refusal);
    }
  }
  const DeltaOptions deltas = asked.deltas;
  std::variant<Request, Rejection> resolved = Resolve(std::move(asked), *model.admission);
  const auto* rejection = std::get_if<Rejection>(&resolved);
  // What is refused whatever its arm says nothing of arms.
  const bool tells = rejection == nullptr || ConcernsKv(*rejection);
  if (!tells || !TakePart(scope, dealt)) dealt.began.reset();
  if (rejection != nullptr) {
    model.metrics->OnRejected(rejection->reason);
    return ToGrpc(*rejection);
  }
  return Prepared{.request = std::get<Request>(std::move(resolved)),
                  .deltas = deltas,
                  .began = std::move(dealt.began)};
}

std::variant<GenerationService::Dealt, grpc::Status> GenerationService::Deal(
    const CallScope& scope, const v1::GenerateRequest& message, const ServedModel& model,
    AskedRequest& asked) {
  for (FieldViolation& violation : CheckContext(message)) {
    asked.violations.push_back(std::move(violation));
  }
  if (!message.experiment().force_arm().empty() && !scope.caller().May(Role::kExperimenter)) {
    return PermissionDenied("experiment.force_arm", RoleName(Role::kExperimenter));
  }
  if (options_.experiments == nullptr) {
    if (!message.experiment().force_arm().empty()) {
      asked.violations.push_back({"experiment.force_arm", "there are no experiments here"});
    }
    return Dealt();
  }
  const auto prompt_tokens = static_cast<int64_t>(asked.options.prompt.size());
  const Subject subject{.request = message,
                        .request_id = asked.options.id,
                        .model = model.name,
                        .prompt_tokens = prompt_tokens,
                        .max_output_tokens = model.admission->MaxOutputTokens(
                            asked.options.stop.max_output_tokens, prompt_tokens),
                        .began = scope.start()};
  absl::StatusOr<Assignment> assignment = options_.experiments->Assign(subject);
  if (!assignment.ok()) {
    asked.violations.push_back(
        {"experiment.force_arm", std::string(assignment.status().message())});
    return Dealt();
  }
  Dealt dealt{.began = std::nullopt, .excluded = std::move(assignment->excluded)};
  if (assignment->parts.empty()) return dealt;
  SetKv(assignment->kv, asked);
  asked.options.arm = assignment->arm;
  v1::RequestBegan began = BeganOf(subject, *assignment);
  began.set_id(NewRequestId());
  began.set_tenant(asked.options.scheduling.tenant);
  dealt.began = std::move(began);
  return dealt;
}

// Once a call: a request that meets its model's successor has begun already.
bool GenerationService::TakePart(CallScope& scope, const Dealt& dealt) {
  if (!dealt.excluded.empty()) options_.experiments->OnExcluded(dealt.excluded);
  if (!dealt.began.has_value() || scope.has_on_close()) return false;
  scope.OnClose([experiments = options_.experiments, id = dealt.began->id()](
                    const v1::AccessLogEntry& entry) { experiments->OnEnded(EndOf(id, entry)); });
  options_.experiments->OnBegan(*dealt.began);
  return true;
}

// Outboxes do not keep their model: the engine, which drops them last, cannot end on its own
// thread.
OutboxHooks GenerationService::HooksOf(const ModelPtr& served, const Prepared& prepared,
                                       v1::AccessLogEntry& entry) {
  const std::weak_ptr<const ServedModel> model = served;
  const std::string& request_id = prepared.request.id;
  std::shared_ptr<Shadow::Tap> tap;
  if (options_.shadow != nullptr && prepared.began.has_value()) {
    tap = options_.shadow->Follow(*prepared.began, served, prepared.request);
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
              [&entry, lanes = served->lanes(), tap](const Finished& finished) {
                Log(finished, lanes, entry);
                if (tap != nullptr) tap->OnFinished(finished);
              }};
}

grpc::Status GenerationService::RefusalOf(grpc::CallbackServerContext& context,
                                          const SubmitResult& submitted,
                                          const std::string& request_id, const ServedModel& model) {
  AddPushback(context, submitted.retry_after);
  switch (submitted.error) {
    case SubmitError::kDuplicateId:
      model.metrics->OnRejected(kDuplicateId);
      return AlreadyExists("request", request_id,
                           absl::StrCat("a request '", request_id, "' is live"));
    case SubmitError::kDraining:
      model.metrics->OnRejected(kDraining);
      return Unavailable(kDraining, "the server takes no new requests; try another one",
                         kDrainRetryDelay);
    case SubmitError::kDeadlineInfeasible:
      model.metrics->OnRejected(kDeadlineInfeasible);
      return DeadlineInfeasible({.left = DeadlineOf(context) - absl::Now(),
                                 .wait = submitted.forecast.least_wait,
                                 .run = submitted.forecast.least_run},
                                submitted.retry_after);
    case SubmitError::kQueueFull:
    case SubmitError::kNone:
      break;
  }
  model.metrics->OnRejected(kQueueFull);
  if (submitted.full == SubmitResult::Full::kTokens) {
    return Exhausted("waiting tokens",
                     absl::StrCat("the queue is full: requests of ", submitted.waiting_tokens,
                                  " tokens are waiting, and ", submitted.limit, " may"),
                     *submitted.retry_after);
  }
  return Exhausted("waiting requests",
                   absl::StrCat("the queue is full: ", submitted.waiting,
                                " requests are waiting, and ", submitted.limit, " may"),
                   *submitted.retry_after);
}

}  // namespace epikv
