#include "server/call/call_scope.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/server_context.h>

#include <chrono>
#include <vector>

#include "runtime/base/require.h"
#include "server/base/durations.h"

namespace epikv {
namespace {

// In ASCII a line stays below the 4096 bytes that a pipe takes whole.
constexpr size_t kMaxLogBytes = 128;

std::vector<absl::string_view> Headers(const grpc::CallbackServerContext& context,
                                       const char* name) {
  std::vector<absl::string_view> values;
  const auto [begin, end] = context.client_metadata().equal_range(name);
  for (auto it = begin; it != end; ++it) values.emplace_back(it->second.data(), it->second.size());
  return values;
}

// Of the certificate that the client has shown and gRPC has verified: without tls_client_ca it asks
// for none.
std::vector<absl::string_view> CertificateNames(const grpc::CallbackServerContext& context) {
  std::vector<absl::string_view> names;
  const std::shared_ptr<const grpc::AuthContext> auth = context.auth_context();
  if (auth == nullptr) return names;
  for (const grpc::string_ref& name : auth->FindPropertyValues(GRPC_X509_SAN_PROPERTY_NAME)) {
    names.emplace_back(name.data(), name.size());
  }
  return names;
}

// gRPC tells it by the wall clock, by which it has just computed it. (absl::Now may be a little
// behind when that clock jumps.)
absl::Time DeadlineOf(const grpc::CallbackServerContext& context) {
  const auto deadline = context.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return absl::InfiniteFuture();
  return SteadyNow() + absl::FromChrono(deadline - std::chrono::system_clock::now());
}

// Two headers break the standard as much as a wrong one does.
std::optional<TraceContext> CallersSpan(const grpc::CallbackServerContext& context) {
  const std::vector<absl::string_view> headers = Headers(context, "traceparent");
  return headers.size() == 1 ? ParseTraceParent(headers.front()) : std::nullopt;
}

}  // namespace

CallScope::CallScope(absl::string_view method, const Frontend& frontend,
                     grpc::CallbackServerContext& context)
    : method_(method),
      frontend_(frontend),
      context_(context),
      deadline_(DeadlineOf(context)),
      callers_span_(CallersSpan(context)),
      span_(NewSpan(callers_span_)) {
  frontend_.traffic.OnCall();
}

std::optional<grpc::Status> CallScope::Admit() {
  Authenticator::Credentials shown{.authorization = Headers(context_, "authorization"),
                                   .certificate = {}};
  if (frontend_.auth.reads_certificates()) shown.certificate = CertificateNames(context_);
  std::optional<grpc::Status> refusal = frontend_.auth.Admit(method_, shown, caller_);
  admitted_ = !refusal.has_value();
  if (refusal.has_value()) frontend_.metrics.OnRejected(ErrorReason(*refusal));
  return refusal;
}

void CallScope::RequireAdmitted() const {
  Require(admitted_, "a request was opened whose caller was not admitted");
}

grpc::Status CallScope::Reject(const Rejection& rejection) {
  frontend_.metrics.OnRejected(rejection.reason);
  return ToGrpc(rejection);
}

grpc::Status CallScope::Close(const grpc::Status& status) {
  frontend_.traffic.OnEnd();
  frontend_.metrics.OnRpcFinished(method_, status.error_code());
  const absl::Time now = SteadyNow();
  *entry_.mutable_time() = TimestampProto(began_);
  entry_.set_method(std::string(method_));
  entry_.set_code(std::string(CodeName(status.error_code())));
  entry_.set_reason(ErrorReason(status));
  entry_.set_seconds(absl::ToDoubleSeconds(now - start_));
  entry_.set_peer(context_.peer());
  entry_.set_trace_id(span_.trace_id);
  entry_.set_span_id(span_.span_id);
  if (callers_span_.has_value()) entry_.set_parent_span_id(callers_span_->span_id);
  entry_.set_sampled(span_.sampled);
  entry_.set_read_seconds(absl::ToDoubleSeconds(arrival_ - start_));
  entry_.set_identity(caller_.name);
  if (on_close_ != nullptr) on_close_(entry_);
  frontend_.access_log.Write(std::move(entry_));
  context_.AddTrailingMetadata("traceparent", span_.ToHeader());
  if (LoadReports* reports = frontend_.load_reports;
      reports != nullptr && LoadReports::AreRequests(method_)) {
    reports->OnRequestEnded(status.error_code());
    context_.AddTrailingMetadata("endpoint-load-metrics-bin",
                                 reports->Report().SerializeAsString());
  }
  return WithTraceId(status, span_.trace_id);
}

std::string ForLog(absl::string_view text) { return ShortenText(text, kMaxLogBytes); }

}  // namespace epikv
