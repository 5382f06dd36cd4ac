#pragma once

#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"

namespace epikv {

// Why a request failed, for machines: ErrorInfo.reason on the wire, `kind` in metrics. It travels
// as a payload of the request's absl::Status.
inline constexpr absl::string_view kReasonUrl = "epikv/reason";

// The request's policy threw or answered an invalid set of victims.
inline constexpr absl::string_view kPolicyFailed = "POLICY_FAILED";
// How it failed, in one of these words; a payload beside the reason.
inline constexpr absl::string_view kPolicyErrorUrl = "epikv/policy_error";
inline constexpr absl::string_view kPolicyThrew = "threw";
inline constexpr absl::string_view kPolicyStatus = "status";  // it returned one that is not OK
inline constexpr absl::string_view kPolicyInvalidSet = "invalid_set";
// Its deadline cannot be met: refused, or dropped while it waited.
inline constexpr absl::string_view kDeadlineInfeasible = "DEADLINE_INFEASIBLE";
// The server is being drained: refused, or ended at the drain's limit.
inline constexpr absl::string_view kDraining = "DRAINING";
// What a completion's text has to be cannot be met, or not be found out in time.
inline constexpr absl::string_view kConstraintFailed = "CONSTRAINT_FAILED";
// When a request that the server ended may be tried again; a payload beside the reason.
inline constexpr absl::string_view kRetryAfterUrl = "epikv/retry_after";
// Why a policy failed that threw an object of no known type.
inline constexpr absl::string_view kNoException = "it threw an object that is not a std::exception";

inline absl::Status WithReason(absl::Status status, absl::string_view reason) {
  status.SetPayload(kReasonUrl, absl::Cord(reason));
  return status;
}

// ErrorInfo.metadata: a payload for each entry.
inline constexpr absl::string_view kMetadataUrl = "epikv/metadata/";

inline absl::Status WithMetadata(absl::Status status, absl::string_view key,
                                 absl::string_view value) {
  status.SetPayload(absl::StrCat(kMetadataUrl, key), absl::Cord(value));
  return status;
}

inline std::map<std::string, std::string> MetadataOf(const absl::Status& status) {
  std::map<std::string, std::string> metadata;
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& value) {
    if (absl::ConsumePrefix(&url, kMetadataUrl)) metadata.emplace(url, value);
  });
  return metadata;
}

inline absl::Status WithPolicyError(absl::Status status, absl::string_view kind) {
  status.SetPayload(kPolicyErrorUrl, absl::Cord(kind));
  return status;
}

// Empty if there is none.
inline std::string PayloadOf(const absl::Status& status, absl::string_view url) {
  const auto payload = status.GetPayload(url);
  return payload.has_value() ? std::string(*payload) : "";
}
inline std::string ReasonOf(const absl::Status& status) { return PayloadOf(status, kReasonUrl); }
inline absl::Status WithRetryAfter(absl::Status status, absl::Duration after) {
  status.SetPayload(kRetryAfterUrl, absl::Cord(absl::FormatDuration(after)));
  return status;
}
inline std::optional<absl::Duration> RetryAfterOf(const absl::Status& status) {
  absl::Duration after;
  if (!absl::ParseDuration(PayloadOf(status, kRetryAfterUrl), &after)) return std::nullopt;
  return after;
}
inline std::string PolicyErrorOf(const absl::Status& status) {
  return PayloadOf(status, kPolicyErrorUrl);
}

}  // namespace epikv
