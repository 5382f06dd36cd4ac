#include "server/call/auth.h"

#include <optional>
#include <utility>
#include <variant>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/base/errors.h"

namespace epikv {
namespace {

constexpr MethodRole kMethodRoles[] = {
    {"GenerationService/Generate", Role::kUser},
    {"GenerationService/GenerateOnce", Role::kUser},
    {"GenerationService/Score", Role::kUser},
    {"GenerationService/CancelRequest", Role::kUser},
    {"TokenizationService/Tokenize", Role::kUser},
    {"TokenizationService/ApplyChatTemplate", Role::kUser},
    {"TokenizationService/Detokenize", Role::kUser},
    {"ModelService/ListModels", Role::kUser},
    {"ModelService/GetModel", Role::kUser},
    {"ModelService/GetTokenizer", Role::kUser},
    {"PolicyService/ListPolicies", Role::kUser},
    {"PolicyService/GetPolicy", Role::kUser},
    {"PacketService/CreatePacket", Role::kUser},
    {"PacketService/ListPackets", Role::kUser},
    {"PacketService/DeletePacket", Role::kUser},
    {"ExperimentService/ListExperiments", Role::kExperimenter},
    {"ExperimentService/GetExperiment", Role::kExperimenter},
    {"ExperimentService/CreateExperiment", Role::kExperimenter},
    {"ExperimentService/UpdateExperiment", Role::kExperimenter},
    {"ExperimentService/StartExperiment", Role::kExperimenter},
    {"ExperimentService/StopExperiment", Role::kExperimenter},
    {"ExperimentService/GetExperimentReport", Role::kExperimenter},
    {"ExperimentService/PlanExperiment", Role::kExperimenter},
    {"ExperimentService/RecordOutcome", Role::kUser},
    {"ExperimentService/BatchRecordOutcomes", Role::kUser},
    {"VllmEngine/Generate", Role::kUser},
    {"VllmEngine/HealthCheck", Role::kUser},
    {"VllmEngine/Abort", Role::kUser},
    {"VllmEngine/GetModelInfo", Role::kUser},
    {"VllmEngine/GetServerInfo", Role::kUser},
    {"VllmEngine/GetLoads", Role::kUser},
    {"VllmEngine/GetTokenizer", Role::kUser},
    {"OpenRcaService/StreamCoreMetrics", Role::kUser},
    {"AdminService/GetServerStatus", Role::kOperator},
    {"AdminService/GetLoad", Role::kOperator},
    {"AdminService/ListActiveRequests", Role::kOperator},
    {"AdminService/Drain", Role::kOperator},
    {"AdminService/Resume", Role::kOperator},
    {"AdminService/GetConfig", Role::kOperator},
    {"AdminService/UpdateConfig", Role::kOperator},
    {"AdminService/LoadModel", Role::kOperator},
    {"AdminService/UnloadModel", Role::kOperator},
    {"AdminService/FlushPrefixCache", Role::kOperator},
    {"AdminService/DumpState", Role::kOperator}};

// Of a method that is not in the table, the operator's; a test finds it.
Role RoleOf(absl::string_view method) {
  for (const MethodRole& row : kMethodRoles) {
    if (row.method == method) return row.role;
  }
  return Role::kOperator;
}

// The token of "Bearer <token>"; nothing where there is no such header, or more than one.
std::optional<absl::string_view> BearerToken(const std::vector<absl::string_view>& authorization) {
  constexpr absl::string_view kScheme = "bearer ";
  if (authorization.size() != 1) return std::nullopt;
  const absl::string_view header = authorization.front();
  if (!absl::StartsWithIgnoreCase(header, kScheme)) return std::nullopt;
  return header.substr(kScheme.size());
}

// Who shows this, or why it is nobody.
std::variant<Identity, grpc::Status> Recognise(const TokenTable& table,
                                               const Authenticator::Credentials& shown) {
  if (shown.authorization.empty() && table.has_certificates()) {
    if (const Identity* known = table.FindCertificate(shown.certificate)) return *known;
    return Unauthenticated(
        "a token is needed, in a header `authorization: Bearer <token>`: no name of the "
        "certificate is "
        "in auth_tokens_file, or names of several");
  }
  const std::optional<absl::string_view> token = BearerToken(shown.authorization);
  if (!token.has_value()) {
    return Unauthenticated(
        "a token is needed: send exactly one header `authorization: Bearer <token>`");
  }
  const TokenTable::Token* const known = table.Find(*token);
  if (known == nullptr) return Unauthenticated("this token is not in auth_tokens_file");
  if (known->until <= absl::Now()) {
    return Unauthenticated(absl::StrCat("this token has expired, at ",
                                        absl::FormatTime(known->until, absl::UTCTimeZone())));
  }
  return known->identity;
}

}  // namespace

absl::Span<const MethodRole> MethodRoles() { return kMethodRoles; }

absl::StatusOr<std::unique_ptr<Authenticator>> Authenticator::Create(AuthOptions options) {
  std::unique_ptr<Authenticator> auth(new Authenticator(std::move(options)));
  if (auth->options_.tokens_file.empty()) return auth;
  if (absl::Status status = auth->Load(); !status.ok()) return status;
  auth->thread_ = std::thread([self = auth.get()] { self->Poll(); });
  return auth;
}

Authenticator::~Authenticator() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  stop_.Signal();
  if (thread_.joinable()) thread_.join();
}

// A file that is wrong leaves the tokens that are known, and is not parsed again as it is; one that
// cannot be read is tried again.
absl::Status Authenticator::Load() {
  auto wrong = [](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("--auth_tokens_file: ", what));
  };
  const absl::StatusOr<FileContents> file = ReadFile(options_.tokens_file);
  if (!file.ok()) return wrong(file.status().message());
  loaded_ = file->version;
  absl::StatusOr<TokenTable> table = TokenTable::Parse(file->text);
  if (!table.ok()) {
    return wrong(absl::StrCat("'", options_.tokens_file, "': ", table.status().message()));
  }
  if (table->has_certificates() && !options_.certificates) {
    return wrong(absl::StrCat("'", options_.tokens_file,
                              "' names certificates (san:), for which clients are not asked: set "
                              "--tls_client_ca"));
  }
  auto tokens = std::make_shared<const TokenTable>(*std::move(table));
  absl::MutexLock lock(&mu_);
  tokens_ = std::move(tokens);
  return absl::OkStatus();
}

void Authenticator::Poll() {
  std::string failure;  // told already
  for (;;) {
    {
      absl::MutexLock lock(&mu_);
      auto stopping = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_; };
      if (stop_.Wait(mu_, options_.poll, stopping)) return;
    }
    if (VersionOf(options_.tokens_file) == loaded_) continue;
    const absl::Status status = Load();
    if (status.ok() || status.message() != failure) options_.on_reload(status);
    failure = std::string(status.message());
  }
}

std::shared_ptr<const TokenTable> Authenticator::tokens() const {
  absl::MutexLock lock(&mu_);
  return tokens_;
}

std::optional<grpc::Status> Authenticator::Admit(absl::string_view method, const Credentials& shown,
                                                 Identity& caller) const {
  caller = {.name = "", .role = Role::kOperator};
  if (const std::shared_ptr<const TokenTable> tokens = this->tokens()) {
    std::variant<Identity, grpc::Status> found = Recognise(*tokens, shown);
    if (const auto* refusal = std::get_if<grpc::Status>(&found)) return *refusal;
    caller = std::get<Identity>(std::move(found));
  }
  const Role needed = RoleOf(method);
  if (!caller.May(needed)) return PermissionDenied(method, RoleName(needed));
  return std::nullopt;
}

}  // namespace epikv
