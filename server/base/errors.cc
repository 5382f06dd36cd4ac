#include "server/base/errors.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "epikv/v1/errors.pb.h"
#include "server/base/durations.h"

namespace epikv {
namespace {

// Of the message as grpc-message carries it, where most bytes of other scripts become three.
constexpr size_t kMaxEncodedMessageBytes = 1024;
constexpr size_t kMaxDescriptionBytes = 512, kMaxFieldBytes = 128;
// Of ErrorInfo and violations. With the message, which the details repeat, and what gRPC adds,
// below the 8 KiB of metadata that clients accept by default, also when the trailer is base64.
constexpr size_t kMaxDetailBytes = 3392;
// What a repeated message costs beside its own bytes.
constexpr size_t kFrameBytes = 4;
constexpr absl::string_view kCut = "...";

bool BeginsCodePoint(char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }

// The longest prefix of whole code points that, with kCut, costs no more than `limit`; or all.
template <typename Cost>
std::string ShortenBy(absl::string_view text, size_t limit, Cost cost_of) {
  size_t cost = 0, end = 0;  // end: of what still fits beside kCut
  for (size_t i = 0; i < text.size(); ++i) {
    if (BeginsCodePoint(text[i]) && cost + kCut.size() <= limit) end = i;
    cost += cost_of(text[i]);
    if (cost > limit) return absl::StrCat(text.substr(0, end), kCut);
  }
  return std::string(text);
}

std::string ShortenMessage(absl::string_view text) {
  return ShortenBy(text, kMaxEncodedMessageBytes, [](char c) {
    return size_t{absl::ascii_isprint(static_cast<unsigned char>(c)) && c != '%' ? 1u : 3u};
  });
}

// Collects the details of one status.
class Details {
 public:
  Details(grpc::StatusCode code, absl::string_view message, absl::string_view reason,
          const std::map<std::string, std::string>& metadata)
      : code_(code) {
    status_.set_code(static_cast<int>(code));
    status_.set_message(ShortenMessage(message));
    v1::ErrorInfo info;
    info.set_reason(std::string(reason));
    info.set_domain("epikv");
    for (const auto& [key, value] : metadata) {
      (*info.mutable_metadata())[key] = ShortenText(value, kMaxFieldBytes);
    }
    Add("ErrorInfo", info);
  }

  void Add(absl::string_view type, const google::protobuf::Message& detail) {
    google::protobuf::Any* any = status_.add_details();
    any->set_type_url(absl::StrCat("type.googleapis.com/google.rpc.", type));
    any->set_value(detail.SerializeAsString());
  }
  // Bytes of what was added.
  size_t size() const {
    size_t bytes = 0;
    for (const auto& detail : status_.details()) bytes += detail.value().size();
    return bytes;
  }
  void AddRetry(absl::Duration after) {
    v1::RetryInfo retry;
    *retry.mutable_retry_delay() = DurationProto(after);
    Add("RetryInfo", retry);
  }
  // subject: the field that asks for what is not there; may be empty.
  void AddPrecondition(absl::string_view reason, absl::string_view subject) {
    v1::PreconditionFailure failure;
    v1::PreconditionFailure::Violation& violation = *failure.add_violations();
    violation.set_type(std::string(reason));
    violation.set_subject(ShortenText(subject, kMaxFieldBytes));
    violation.set_description(ShortenText(status_.message(), kMaxDescriptionBytes));
    Add("PreconditionFailure", failure);
  }
  void AddResource(absl::string_view type, absl::string_view name, absl::string_view description) {
    v1::ResourceInfo resource;
    resource.set_resource_type(std::string(type));
    resource.set_resource_name(ShortenText(name, kMaxFieldBytes));
    resource.set_description(ShortenText(description, kMaxDescriptionBytes));
    Add("ResourceInfo", resource);
  }

  grpc::Status ToGrpc() const {
    return grpc::Status(code_, status_.message(), status_.SerializeAsString());
  }

 private:
  const grpc::StatusCode code_;
  v1::Status status_;
};

// room: in bytes.
v1::BadRequest BadRequestOf(const std::vector<FieldViolation>& violations, size_t room) {
  v1::BadRequest bad;
  for (size_t i = 0; i < violations.size(); ++i) {
    v1::BadRequest::FieldViolation next;
    next.set_field(ShortenText(violations[i].field, kMaxFieldBytes));
    next.set_description(ShortenText(violations[i].description, kMaxDescriptionBytes));
    const size_t bytes = next.ByteSizeLong() + kFrameBytes;
    if (bytes > room) {
      next.set_field("...");
      next.set_description(absl::StrCat("and ", violations.size() - i, " more"));
      *bad.add_field_violations() = std::move(next);
      break;
    }
    room -= bytes;
    *bad.add_field_violations() = std::move(next);
  }
  return bad;
}

// The ErrorInfo of an error of ours, which is its first detail.
std::optional<v1::ErrorInfo> InfoOf(const v1::Status& details) {
  v1::ErrorInfo info;
  if (details.details().empty() || !info.ParseFromString(details.details(0).value())) {
    return std::nullopt;
  }
  return info;
}

}  // namespace

Rejection InvalidRequest(std::vector<FieldViolation> violations, absl::string_view reason) {
  const FieldViolation& first = violations.front();
  std::string message = absl::StrCat(first.field, ": ", first.description);
  if (violations.size() > 1) absl::StrAppend(&message, " (and ", violations.size() - 1, " more)");
  return {.reason = std::string(reason),
          .message = std::move(message),
          .violations = std::move(violations)};
}

grpc::Status ToGrpc(const Rejection& rejection) {
  Details details(static_cast<grpc::StatusCode>(rejection.code), rejection.message,
                  rejection.reason, rejection.metadata);
  if (rejection.code == absl::StatusCode::kFailedPrecondition) {
    details.AddPrecondition(rejection.reason, rejection.violations.empty()
                                                  ? absl::string_view()
                                                  : rejection.violations.front().field);
  }
  if (!rejection.violations.empty()) {
    details.Add("BadRequest",
                BadRequestOf(rejection.violations,
                             kMaxDetailBytes - std::min(kMaxDetailBytes, details.size())));
  }
  return details.ToGrpc();
}

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const auto code = static_cast<grpc::StatusCode>(status.code());
  const std::string given = ReasonOf(status);
  const absl::string_view reason = given.empty() ? CodeName(code) : absl::string_view(given);
  Details details(code, status.message(), reason, MetadataOf(status));
  if (code == grpc::StatusCode::FAILED_PRECONDITION) details.AddPrecondition(reason, "");
  if (const std::optional<absl::Duration> after = RetryAfterOf(status)) {
    details.AddRetry(*after);
  } else if (code == grpc::StatusCode::UNAVAILABLE) {
    details.AddRetry(kDrainRetryDelay);
  }
  return details.ToGrpc();
}

grpc::Status NotFound(absl::string_view type, absl::string_view name, absl::string_view description,
                      std::optional<absl::Duration> retry_after) {
  Details details(grpc::StatusCode::NOT_FOUND, description, kNotFound, {});
  details.AddResource(type, name, description);
  if (retry_after.has_value()) details.AddRetry(*retry_after);
  return details.ToGrpc();
}

grpc::Status AlreadyExists(absl::string_view type, absl::string_view name,
                           absl::string_view description, absl::string_view reason) {
  Details details(grpc::StatusCode::ALREADY_EXISTS, description, reason, {});
  details.AddResource(type, name, description);
  return details.ToGrpc();
}

grpc::Status Exhausted(absl::string_view subject, absl::string_view description,
                       absl::Duration retry_after) {
  Details details(grpc::StatusCode::RESOURCE_EXHAUSTED, description, kQueueFull, {});
  v1::QuotaFailure failure;
  v1::QuotaFailure::Violation& violation = *failure.add_violations();
  violation.set_subject(std::string(subject));
  violation.set_description(ShortenText(description, kMaxDescriptionBytes));
  details.Add("QuotaFailure", failure);
  details.AddRetry(retry_after);
  return details.ToGrpc();
}

grpc::Status AnswerTooLarge(int64_t bytes, int64_t limit, absl::string_view advice) {
  return ToGrpc(Rejection{
      .code = absl::StatusCode::kResourceExhausted,
      .reason = "ANSWER_TOO_LARGE",
      .message =
          absl::StrCat("the answer has at least ", bytes,
                       " bytes, more than --max_sent_message_bytes allows (", limit, "); ", advice),
      .metadata = {{"limit", absl::StrCat(limit)}, {"bytes", absl::StrCat(bytes)}}});
}

grpc::Status DeadlineInfeasible(const DeadlineEstimate& estimate,
                                std::optional<absl::Duration> retry_after) {
  auto seconds = [](absl::Duration d) { return absl::StrFormat("%.3f", absl::ToDoubleSeconds(d)); };
  const std::string left = seconds(std::max(absl::ZeroDuration(), estimate.left)),
                    wait = seconds(estimate.wait), run = seconds(estimate.run);
  Details details(grpc::StatusCode::DEADLINE_EXCEEDED,
                  absl::StrCat("the deadline cannot be met: it is ", left,
                               " s away; the request would wait at least ", wait,
                               " s and run at least ", run, " s"),
                  kDeadlineInfeasible,
                  {{"seconds_left", left}, {"wait_seconds", wait}, {"run_seconds", run}});
  if (retry_after.has_value()) details.AddRetry(*retry_after);
  return details.ToGrpc();
}

grpc::Status Unavailable(absl::string_view reason, absl::string_view description,
                         absl::Duration retry_after) {
  Details details(grpc::StatusCode::UNAVAILABLE, description, reason, {});
  details.AddRetry(retry_after);
  return details.ToGrpc();
}

grpc::Status Unauthenticated(absl::string_view description) {
  return Details(grpc::StatusCode::UNAUTHENTICATED, description, kUnauthenticated, {}).ToGrpc();
}

grpc::Status PermissionDenied(absl::string_view method, absl::string_view needed) {
  return Details(grpc::StatusCode::PERMISSION_DENIED,
                 absl::StrCat(method, " needs the role ", needed), kPermissionDenied,
                 {{"role", std::string(needed)}})
      .ToGrpc();
}

std::string ErrorReason(const grpc::Status& status) {
  v1::Status details;
  if (!details.ParseFromString(status.error_details())) return "";
  const std::optional<v1::ErrorInfo> info = InfoOf(details);
  return info.has_value() ? info->reason() : "";
}

std::optional<absl::Duration> RetryDelayIn(const grpc::Status& status) {
  v1::Status details;
  if (!details.ParseFromString(status.error_details())) return std::nullopt;
  for (const auto& detail : details.details()) {
    v1::RetryInfo retry;
    if (detail.type_url() != "type.googleapis.com/google.rpc.RetryInfo") continue;
    if (retry.ParseFromString(detail.value())) return DurationOf(retry.retry_delay());
  }
  return std::nullopt;
}

grpc::Status WithTraceId(const grpc::Status& status, const std::string& trace_id) {
  v1::Status details;
  if (!details.ParseFromString(status.error_details())) return status;
  std::optional<v1::ErrorInfo> info = InfoOf(details);
  if (!info.has_value()) return status;
  (*info->mutable_metadata())["trace_id"] = trace_id;
  details.mutable_details(0)->set_value(info->SerializeAsString());
  return grpc::Status(status.error_code(), status.error_message(), details.SerializeAsString());
}

std::string ShortenText(absl::string_view text, size_t limit) {
  return ShortenBy(text, limit, [](char) { return size_t{1}; });
}

absl::string_view CodeName(grpc::StatusCode code) {
  static constexpr absl::string_view kNames[] = {"OK",
                                                 "CANCELLED",
                                                 "UNKNOWN",
                                                 "INVALID_ARGUMENT",
                                                 "DEADLINE_EXCEEDED",
                                                 "NOT_FOUND",
                                                 "ALREADY_EXISTS",
                                                 "PERMISSION_DENIED",
                                                 "RESOURCE_EXHAUSTED",
                                                 "FAILED_PRECONDITION",
                                                 "ABORTED",
                                                 "OUT_OF_RANGE",
                                                 "UNIMPLEMENTED",
                                                 "INTERNAL",
                                                 "UNAVAILABLE",
                                                 "DATA_LOSS",
                                                 "UNAUTHENTICATED"};
  const auto index = static_cast<size_t>(code);
  return index < std::size(kNames) ? kNames[index] : kNames[2];
}

}  // namespace epikv
