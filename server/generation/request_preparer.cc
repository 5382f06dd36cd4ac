#include "server/generation/request_preparer.h"

#include <algorithm>
#include <iterator>
#include <type_traits>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "runtime/admission/request_checks.h"
#include "runtime/base/reason.h"
#include "server/base/errors.h"
#include "server/packets/packet_service.h"

namespace epikv {
namespace {

// A salt that no other tenant can have.
std::string OfTenant(const std::string& tenant, const std::string& salt) {
  return absl::StrCat(tenant.size(), ":", tenant, salt);
}

// Nobody can guess it: who did would keep another's request out by a duplicate.
std::string NewRequestId() {
  absl::BitGen random;
  return absl::StrCat(absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16),
                      absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16));
}

// Whether other options for its KV cache could have been accepted; or other steering, where some
// arm would have set it.
bool ConcernsArms(const Rejection& rejection, bool steers) {
  constexpr absl::string_view kReasons[] = {"KV_BUDGET", "KV_POOL_TOO_SMALL", "KV_TIER_TOO_SMALL",
                                            "PROMPT_EVICTED", "SPAN_RANGE"};
  return std::find(std::begin(kReasons), std::end(kReasons), rejection.reason) !=
             std::end(kReasons) ||
         std::any_of(rejection.violations.begin(), rejection.violations.end(),
                     [=](const FieldViolation& violation) {
                       return absl::StartsWith(violation.field, "kv.") ||
                              (steers && absl::StartsWith(violation.field, "sampling.steering"));
                     });
}

// A text that is no constraint is a violation beside others.
std::optional<grpc::Status> Constrain(const ConstraintText& text,
                                      ConstraintCompiler::Result constraint, AskedRequest& asked) {
  if (constraint.ok()) {
    asked.options.sampling.constraint = *std::move(constraint);
  } else if (absl::IsInvalidArgument(constraint.status())) {
    asked.violations.push_back({ConstraintField(text), std::string(constraint.status().message())});
  } else if (absl::IsResourceExhausted(constraint.status())) {
    return Exhausted("memory of constraints", constraint.status().message(), kCompileRetryDelay);
  } else {
    return ToGrpc(constraint.status());
  }
  return std::nullopt;
}

// What a conversation's newest message asks; empty: it is none, or its model has no words for it.
std::vector<int32_t> QuestionOf(const v1::GenerateRequest& message, const ServedModel& model) {
  if (!message.has_chat() || message.chat().messages().empty()) return {};
  const std::string& text = message.chat().messages().rbegin()->content();
  absl::StatusOr<std::vector<int32_t>> tokens =
      model.tokenizer->Encode(text, {.add_special = false});
  if (!tokens.ok()) return {};
  constexpr size_t kMost = 1024;
  if (tokens->size() > kMost) tokens->resize(kMost);
  return *std::move(tokens);
}

}  // namespace

v1::PacketHead HeadOf(const ServedModel& model, const std::string& tenant) {
  const Manifest& manifest = model.admission->manifest();
  v1::PacketHead head;
  head.set_tenant(tenant);
  head.set_model(model.name);
  head.set_weights(manifest.weights);
  head.set_dtype(std::string(DTypeName(manifest.dtype)));
  head.set_quantization(manifest.quantization);
  head.set_kv_format(std::string(model.admission->kv_format().name()));
  return head;
}

template <typename Message>
RequestPreparer::Result RequestPreparer::Prepare(CallScope& scope, const Message& message,
                                                 const ServedModel& model, bool may_wait,
                                                 const PacketAsked& leaves) {
  std::shared_ptr<AskedSession> session;
  if constexpr (std::is_same_v<Message, v1::GenerateRequest>) {
    if (message.has_session() && !may_wait) return MustWait();
  }
  AskedRequest asked =
      FromProto(message, {.tokenizer = *model.tokenizer,
                          .chat = model.chat,
                          .goes_on = !message.packets().empty() || leaves.soft_tokens});
  const std::optional<ConstraintText>& text = asked.constraint;
  std::optional<ConstraintCompiler::Result> constraint;
  if (text.has_value() && !may_wait) {
    constraint = model.constraints->Remembered(*text);
    if (!constraint.has_value()) return MustWait();
  }
  if (asked.options.id.empty()) asked.options.id = NewRequestId();
  if (!asked.has_seed) asked.options.sampling.seed = absl::Uniform<uint64_t>(absl::BitGen());
  std::string& tenant = asked.options.scheduling.tenant;
  if (std::optional<grpc::Status> refusal =
          SettleTenant(scope.caller(), "scheduling.tenant", tenant)) {
    model.metrics->OnRejected(kPermissionDenied);
    return *std::move(refusal);
  }
  if (!packets_.any() && (leaves.keep || !message.packets().empty())) {
    model.metrics->OnRejected(kPacketsOff);
    return PacketsOff();
  }
  for (const std::string& id : message.packets()) {
    const v1::PacketHead head = HeadOf(model, tenant);
    absl::StatusOr<std::shared_ptr<const Packet>> packet =
        may_wait ? packets_.Load(tenant, id, head) : packets_.Find(tenant, id, head);
    if (!packet.ok()) {
      grpc::Status refusal = absl::IsNotFound(packet.status())
                                 ? NotFound("packet", id, packet.status().message())
                                 : ToGrpc(packet.status());
      model.metrics->OnRejected(ErrorReason(refusal));
      AddPushback(scope.context(), RetryAfterOf(packet.status()));
      return refusal;
    }
    if (*packet == nullptr) return MustWait();
    asked.options.packets.push_back(*std::move(packet));
  }
  asked.options.wrap = leaves.soft_tokens;
  asked.options.output.packet = leaves.keep;
  if (leaves.keep && !asked.options.stop.max_output_tokens.has_value()) {
    asked.options.stop.max_output_tokens = 1;
  }
  scope.entry().set_tenant(ForLog(tenant));
  asked.options.arrival = scope.arrival();
  asked.options.deadline = scope.deadline();
  Dealt dealt;
  if constexpr (std::is_same_v<Message, v1::GenerateRequest>) {
    auto result = Deal(scope, message, model, asked);
    if (auto* refusal = std::get_if<grpc::Status>(&result)) {
      model.metrics->OnRejected(kPermissionDenied);
      return std::move(*refusal);
    }
    dealt = std::get<Dealt>(std::move(result));
    if (message.has_session()) {
      if (sessions_ == nullptr || !sessions_->any()) {
        model.metrics->OnRejected(kSessionsOff);
        return ToGrpc(Rejection{.code = absl::StatusCode::kFailedPrecondition,
                                .reason = std::string(kSessionsOff),
                                .message = "this server keeps no sessions (--session_bytes is 0)",
                                .violations = {{"session", "this server keeps none"}}});
      }
      session = GoOn(scope, message, model, asked);
    }
    // Who has no name that could be his will be told so.
    if (text.has_value() && tenant.size() <= kMaxTenantBytes) {
      if (!constraint.has_value()) constraint = model.constraints->Compile(*text, tenant);
      if (std::optional<grpc::Status> refusal = Constrain(*text, *std::move(constraint), asked)) {
        model.metrics->OnRejected(ErrorReason(*refusal));
        return *std::move(refusal);
      }
      if (dealt.hidden.has_value()) {
        dealt.hidden->asked.options.sampling.constraint = asked.options.sampling.constraint;
      }
    }
  }
  const DeltaOptions deltas = asked.deltas;
  std::variant<Request, Rejection> resolved = Resolve(std::move(asked), *model.admission);
  const auto* rejection = std::get_if<Rejection>(&resolved);
  // What is refused whatever its arm says nothing of arms.
  const bool tells = rejection == nullptr || ConcernsArms(*rejection, dealt.steers);
  std::optional<Request> hidden;
  if (rejection == nullptr) hidden = Admit(dealt, std::get<Request>(resolved), model);
  if (!tells || !TakePart(scope, dealt)) dealt.began.reset();
  if (rejection != nullptr) {
    model.metrics->OnRejected(rejection->reason);
    return ToGrpc(*rejection);
  }
  Request& request = std::get<Request>(resolved);
  if (!options_.shared_prefixes && !scope.caller().name.empty()) {
    request.prefix_salt = OfTenant(request.scheduling.tenant, request.prefix_salt);
  }
  return Prepared{.request = std::move(request),
                  .deltas = deltas,
                  .began = std::move(dealt.began),
                  .hidden = std::move(hidden),
                  .session = std::move(session)};
}

std::optional<Request> RequestPreparer::Admit(Dealt& dealt, const Request& shown,
                                              const ServedModel& model) {
  // A replay would have to hold packets that may have been deleted. What leaves one is no answer.
  if (!dealt.hidden.has_value() || shown.completions() > 1 || !shown.packets.empty() ||
      shown.soft != nullptr || shown.output.packet) {
    return std::nullopt;
  }
  std::variant<Request, Rejection> hidden =
      Resolve(std::move(dealt.hidden->asked), *model.admission);
  if (std::holds_alternative<Rejection>(hidden)) return std::nullopt;
  dealt.began->mutable_parts(dealt.hidden->part)->set_pair_arm(dealt.hidden->arm);
  return std::get<Request>(std::move(hidden));
}

// Behind a conversation's beginning the model reads what has been said since, and keeps all of that
// if it is little. Where it is much, or nothing is known of a long conversation, the question
// chooses what is left of it.
std::shared_ptr<AskedSession> RequestPreparer::GoOn(CallScope& scope,
                                                    const v1::GenerateRequest& message,
                                                    const ServedModel& model, AskedRequest& asked) {
  constexpr size_t kMostIdBytes = 128;
  constexpr int64_t kLeastBudget = 64, kMostEpisodes = 16, kQuestionTokens = 64, kLittle = 512;
  const v1::SessionOptions& session = message.session();
  RequestOptions& options = asked.options;
  const size_t faults = asked.violations.size();
  auto require = [&](bool ok, std::string field, std::string must) {
    if (!ok) asked.violations.push_back({std::move(field), std::move(must)});
  };
  Sessions::Name name{
      .tenant = options.scheduling.tenant,
      .id = session.id(),
      .model = model.name,
      .budget = session.budget_tokens(),
      .episodes = session.episodes() == 0 ? Sessions::Name().episodes : session.episodes()};
  require(!name.id.empty() && name.id.size() <= kMostIdBytes, "session.id",
          absl::StrCat("must have 1 to ", kMostIdBytes, " bytes"));
  require(name.budget >= kLeastBudget, "session.budget_tokens",
          absl::StrCat("must be at least ", kLeastBudget, ", is ", name.budget));
  require(name.episodes <= kMostEpisodes, "session.episodes",
          absl::StrCat("must be at most ", kMostEpisodes, ", is ", name.episodes));
  require(options.packets.empty(), "packets", "cannot be set together with a session");
  require(options.completions == 1, "sampling.n", "must be 1 in a session");
  require(!options.output.prompt_logprobs, "output.prompt_logprobs",
          "cannot be set together with a session: what an episode stands for is not computed");
  v1::KvOptions chosen = message.kv();
  chosen.clear_read_tokens();
  chosen.clear_cache_salt();
  chosen.clear_bypass_prefix_cache();
  require(chosen.ByteSizeLong() == 0, "kv",
          "a session chooses all but read_tokens, cache_salt and bypass_prefix_cache");
  require(name.budget < kLeastBudget || name.episodes > kMostEpisodes ||
              sessions_->HasRoomFor(name, model),
          "session.budget_tokens", "is more than this server can keep of one (--session_bytes)");
  const int64_t vocab = model.admission->manifest().vocab_size;
  const bool readable = std::all_of(options.prompt.begin(), options.prompt.end(),
                                    [=](int32_t token) { return token >= 0 && token < vocab; });
  if (asked.violations.size() > faults || options.prompt.empty() || !readable) return nullptr;
  auto going_on =
      std::make_shared<AskedSession>(AskedSession{.name = name, .tokens = options.prompt});
  const auto size = std::ssize(options.prompt);
  const int64_t output = model.admission->MaxOutputTokens(options.stop.max_output_tokens, size);
  if (size <= name.budget) {
    scope.frontend().metrics.OnSessionRequest(Metrics::SessionStart::kWhole);
    return going_on;
  }
  std::vector<int32_t> question = QuestionOf(message, model);
  if (question.size() < 2) {
    question = {options.prompt.end() - std::min(size, kQuestionTokens), options.prompt.end()};
  }
  options.kv.positions = SessionPositions(model, size + std::ssize(question) + output);
  Sessions::Start start =
      sessions_->Find(name, model.weak_from_this(), options.prompt, model.embed(question));
  if (start.episode != nullptr) {
    scope.frontend().metrics.OnSessionRequest(Metrics::SessionStart::kEpisode);
    options.packets = {std::move(start.episode)};
    options.prompt.erase(options.prompt.begin(), options.prompt.begin() + start.tokens);
    if (size - start.tokens <= kLittle) return going_on;
  } else {
    scope.frontend().metrics.OnSessionRequest(Metrics::SessionStart::kAnew);
  }
  options.kv.policy = "epicache";
  options.kv.budget = name.budget;
  options.kv.params = {{"query", std::vector<int64_t>(question.begin(), question.end())}};
  return going_on;
}

std::variant<RequestPreparer::Dealt, grpc::Status> RequestPreparer::Deal(
    const CallScope& scope, const v1::GenerateRequest& message, const ServedModel& model,
    AskedRequest& asked) {
  for (FieldViolation& violation : CheckContext(message)) {
    asked.violations.push_back(std::move(violation));
  }
  if (!message.experiment().force_arm().empty() && !scope.caller().May(Role::kExperimenter)) {
    return PermissionDenied("experiment.force_arm", RoleName(Role::kExperimenter));
  }
  if (message.has_session()) return Dealt();  // which chooses what arms would
  if (experiments_ == nullptr) {
    if (!message.experiment().force_arm().empty()) {
      asked.violations.push_back(
          {"experiment.force_arm",
           "this server has no experiments (--experiment_store is not set)"});
    }
    return Dealt();
  }
  auto prompt_tokens = static_cast<int64_t>(asked.options.prompt.size());
  for (const auto& packet : asked.options.packets) prompt_tokens += packet->num_tokens();
  const Subject subject{.request = message,
                        .request_id = asked.options.id,
                        .model = model.name,
                        .prompt_tokens = prompt_tokens,
                        .max_output_tokens = model.admission->MaxOutputTokens(
                            asked.options.stop.max_output_tokens, prompt_tokens),
                        .began = absl::Now()};
  absl::StatusOr<Assignment> assignment = experiments_->Assign(subject);
  if (!assignment.ok()) {
    asked.violations.push_back(
        {"experiment.force_arm", std::string(assignment.status().message())});
    return Dealt();
  }
  Dealt dealt{.began = std::nullopt, .excluded = std::move(assignment->excluded)};
  if (assignment->parts.empty()) return dealt;
  if (const auto& pairing = assignment->pairing; options_.pairs && pairing.has_value()) {
    dealt.hidden = Hidden{.asked = asked, .part = pairing->part, .arm = pairing->arm};
    SetKv(pairing->kv, dealt.hidden->asked);
    if (pairing->steering.has_value()) SetSteering(*pairing->steering, dealt.hidden->asked);
  }
  SetKv(assignment->kv, asked);
  if (assignment->steering.has_value()) SetSteering(*assignment->steering, asked);
  dealt.steers = assignment->steers;
  asked.options.arm = assignment->arm;
  v1::RequestBegan began = BeganOf(subject, *assignment);
  began.set_id(NewRequestId());
  began.set_tenant(asked.options.scheduling.tenant);
  dealt.began = std::move(began);
  return dealt;
}

// Once a call: a request that meets its model's successor has begun already.
bool RequestPreparer::TakePart(CallScope& scope, const Dealt& dealt) {
  if (scope.has_on_close()) return false;
  if (!dealt.excluded.empty()) {
    experiments_->OnExcluded(dealt.excluded);
    if (!dealt.began.has_value()) scope.OnClose([](const v1::AccessLogEntry&) {});  // it was told
  }
  if (!dealt.began.has_value()) return false;
  scope.OnClose([experiments = experiments_, id = dealt.began->id()](
                    const v1::AccessLogEntry& entry) { experiments->OnEnded(EndOf(id, entry)); });
  experiments_->OnBegan(*dealt.began);
  return true;
}

template RequestPreparer::Result RequestPreparer::Prepare(CallScope&, const v1::GenerateRequest&,
                                                          const ServedModel&, bool,
                                                          const PacketAsked&);
template RequestPreparer::Result RequestPreparer::Prepare(CallScope&, const v1::ScoreRequest&,
                                                          const ServedModel&, bool,
                                                          const PacketAsked&);

}  // namespace epikv
