#include "server/errors.h"

#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "epikv/v1/errors.pb.h"
#include "runtime/reason.h"

namespace epikv {
namespace {

constexpr size_t kMaxMessageBytes = 1024, kMaxDescriptionBytes = 512, kMaxFieldBytes = 128;
// With the message and what gRPC adds, below the 8 KiB of metadata that clients accept by default,
// also when the trailer is base64.
constexpr size_t kMaxDetailBytes = 4096;

// At most `limit` bytes, cut between code points.
std::string Shorten(absl::string_view text, size_t limit) {
  if (text.size() <= limit) return std::string(text);
  size_t end = limit - 3;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return absl::StrCat(text.substr(0, end), "...");
}

// Collects the details of one status.
class Details {
 public:
  Details(grpc::StatusCode code, absl::string_view message, absl::string_view reason,
          const std::map<std::string, std::string>& metadata)
      : code_(code) {
    status_.set_code(static_cast<int>(code));
    status_.set_message(Shorten(message, kMaxMessageBytes));
    v1::ErrorInfo info;
    info.set_reason(std::string(reason));
    info.set_domain("epikv");
    for (const auto& [key, value] : metadata) {
      (*info.mutable_metadata())[key] = Shorten(value, kMaxFieldBytes);
    }
    Add("ErrorInfo", info);
  }

  void Add(absl::string_view type, const google::protobuf::Message& detail) {
    google::protobuf::Any* any = status_.add_details();
    any->set_type_url(absl::StrCat("type.googleapis.com/google.rpc.", type));
    any->set_value(detail.SerializeAsString());
  }
  void AddRetry(absl::Duration after) {
    v1::RetryInfo retry;
    const absl::Duration whole = absl::Floor(after, absl::Seconds(1));
    retry.mutable_retry_delay()->set_seconds(absl::ToInt64Seconds(whole));
    retry.mutable_retry_delay()->set_nanos(
        static_cast<int32_t>(absl::ToInt64Nanoseconds(after - whole)));
    Add("RetryInfo", retry);
  }
  void AddResource(absl::string_view type, absl::string_view name, absl::string_view description) {
    v1::ResourceInfo resource;
    resource.set_resource_type(std::string(type));
    resource.set_resource_name(Shorten(name, kMaxFieldBytes));
    resource.set_description(Shorten(description, kMaxDescriptionBytes));
    Add("ResourceInfo", resource);
  }

  grpc::Status ToGrpc() const {
    return grpc::Status(code_, status_.message(), status_.SerializeAsString());
  }

 private:
  const grpc::StatusCode code_;
  v1::Status status_;
};

v1::BadRequest BadRequestOf(const std::vector<FieldViolation>& violations) {
  v1::BadRequest bad;
  size_t room = kMaxDetailBytes;
  for (size_t i = 0; i < violations.size(); ++i) {
    v1::BadRequest::FieldViolation next;
    next.set_field(Shorten(violations[i].field, kMaxFieldBytes));
    next.set_description(Shorten(violations[i].description, kMaxDescriptionBytes));
    if (next.ByteSizeLong() > room) {
      next.set_field("...");
      next.set_description(absl::StrCat("and ", violations.size() - i, " more"));
      *bad.add_field_violations() = std::move(next);
      break;
    }
    room -= next.ByteSizeLong();
    *bad.add_field_violations() = std::move(next);
  }
  return bad;
}

}  // namespace

grpc::Status ToGrpc(const Rejection& rejection) {
  Details details(static_cast<grpc::StatusCode>(rejection.code), rejection.message,
                  rejection.reason, rejection.metadata);
  if (!rejection.violations.empty()) {
    details.Add("BadRequest", BadRequestOf(rejection.violations));
  }
  return details.ToGrpc();
}

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const auto code = static_cast<grpc::StatusCode>(status.code());
  const std::string given = ReasonOf(status);
  return Details(code, status.message(), given.empty() ? CodeName(code) : given, {}).ToGrpc();
}

grpc::Status NotFound(absl::string_view type, absl::string_view name,
                      absl::string_view description) {
  Details details(grpc::StatusCode::NOT_FOUND, description, kNotFound, {});
  details.AddResource(type, name, description);
  return details.ToGrpc();
}

grpc::Status AlreadyExists(absl::string_view type, absl::string_view name,
                           absl::string_view description) {
  Details details(grpc::StatusCode::ALREADY_EXISTS, description, kDuplicateId, {});
  details.AddResource(type, name, description);
  return details.ToGrpc();
}

grpc::Status Exhausted(absl::string_view subject, absl::string_view description,
                       absl::Duration retry_after) {
  Details details(grpc::StatusCode::RESOURCE_EXHAUSTED, description, kQueueFull, {});
  v1::QuotaFailure failure;
  v1::QuotaFailure::Violation& violation = *failure.add_violations();
  violation.set_subject(std::string(subject));
  violation.set_description(std::string(description));
  details.Add("QuotaFailure", failure);
  details.AddRetry(retry_after);
  return details.ToGrpc();
}

grpc::Status Unavailable(absl::string_view reason, absl::string_view description,
                         absl::Duration retry_after) {
  Details details(grpc::StatusCode::UNAVAILABLE, description, reason, {});
  details.AddRetry(retry_after);
  return details.ToGrpc();
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
