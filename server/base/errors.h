#pragma once

#include <grpcpp/support/status.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "runtime/admission/admission.h"
#include "runtime/base/reason.h"

// What clients are told when something fails: one canonical code, one sentence, and the details of
// google.rpc in the trailer `grpc-status-details-bin`, of which ErrorInfo is never missing.

namespace epikv {

// ErrorInfo.reason of what the server itself refuses or ends.
inline constexpr absl::string_view kSlowReader = "SLOW_READER";
inline constexpr absl::string_view kNotUtf8 = "NOT_UTF8";
inline constexpr absl::string_view kMalformed = "MALFORMED";
inline constexpr absl::string_view kQueueFull = "QUEUE_FULL";
inline constexpr absl::string_view kStarting = "STARTING";
inline constexpr absl::string_view kLoading = "LOADING";
inline constexpr absl::string_view kDuplicateId = "DUPLICATE_ID";
inline constexpr absl::string_view kNotFound = "NOT_FOUND";
inline constexpr absl::string_view kStoreUnavailable = "STORE_UNAVAILABLE";
inline constexpr absl::string_view kPacketsFull = "PACKETS_FULL";
inline constexpr absl::string_view kPacketsOff = "PACKETS_OFF";
inline constexpr absl::string_view kSessionsOff = "SESSIONS_OFF";
inline constexpr absl::string_view kPacketModel = "PACKET_MODEL";
inline constexpr absl::string_view kUnauthenticated = "UNAUTHENTICATED";
inline constexpr absl::string_view kPermissionDenied = "PERMISSION_DENIED";

// All that is wrong with a request, of which the sentence names the first and counts the others.
Rejection InvalidRequest(std::vector<FieldViolation> violations,
                         absl::string_view reason = "INVALID_REQUEST");

// Clients accept at most 8 KiB of metadata: what does not fit is counted, not sent.
grpc::Status ToGrpc(const Rejection& rejection);

// Of a request that has ended, or of a model that was not loaded. Its reason is the payload of
// runtime/base/reason.h, else the code's name. Says when to try again if the status does, and
// always of UNAVAILABLE.
grpc::Status ToGrpc(const absl::Status& status);

// What a request has, and what it needs at least.
struct DeadlineEstimate {
  absl::Duration left, wait, run;
};

// retry_after: when it may be there.
grpc::Status NotFound(absl::string_view type, absl::string_view name, absl::string_view description,
                      std::optional<absl::Duration> retry_after = std::nullopt);
grpc::Status AlreadyExists(absl::string_view type, absl::string_view name,
                           absl::string_view description, absl::string_view reason = kDuplicateId);
// subject: what is used up; retry_after: when it may be free again.
grpc::Status Exhausted(absl::string_view subject, absl::string_view description,
                       absl::Duration retry_after);
// limit: of --max_sent_message_bytes; advice: what to do in its place.
grpc::Status AnswerTooLarge(int64_t bytes, int64_t limit, absl::string_view advice);
// What was refused at the door: a deadline that cannot be met.
grpc::Status DeadlineInfeasible(const DeadlineEstimate& estimate,
                                std::optional<absl::Duration> retry_after);
// When what a draining server has refused or ended may be tried again: another replica takes it.
// A model cannot be asked for a conversation, or for this one.
inline constexpr absl::string_view kChatFormat = "CHAT_FORMAT";

inline constexpr absl::Duration kDrainRetryDelay = absl::Seconds(1);
grpc::Status Unavailable(absl::string_view reason, absl::string_view description,
                         absl::Duration retry_after);

grpc::Status Unauthenticated(absl::string_view description);
// needed: the role that the caller does not have.
grpc::Status PermissionDenied(absl::string_view method, absl::string_view needed);

// ErrorInfo.reason of an error of ours; else empty.
std::string ErrorReason(const grpc::Status& status);
// When what an error of ours refused may be tried again, if it says so.
std::optional<absl::Duration> RetryDelayIn(const grpc::Status& status);
// An error of ours with `trace_id` in its ErrorInfo; any other status as it is.
grpc::Status WithTraceId(const grpc::Status& status, const std::string& trace_id);

// The longest prefix of whole code points that, with "...", takes no more than `limit` bytes; or
// all.
std::string ShortenText(absl::string_view text, size_t limit);

// "INVALID_ARGUMENT"; "UNKNOWN" for codes that gRPC does not have.
absl::string_view CodeName(grpc::StatusCode code);

}  // namespace epikv
