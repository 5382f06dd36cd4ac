#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"

namespace epikv {

// Why a request failed, for machines: ErrorInfo.reason on the wire, `kind` in metrics. It travels
// as a payload of the request's absl::Status.
inline constexpr absl::string_view kReasonUrl = "epikv/reason";

// The request's policy threw or answered an invalid set of victims.
inline constexpr absl::string_view kPolicyFailed = "POLICY_FAILED";
// Its deadline cannot be met: refused, or dropped while it waited.
inline constexpr absl::string_view kDeadlineInfeasible = "DEADLINE_INFEASIBLE";
// The server is being drained: refused, or ended at the drain's limit.
inline constexpr absl::string_view kDraining = "DRAINING";
// Why a policy failed that threw an object of no known type.
inline constexpr absl::string_view kNoException = "it threw what is no exception";

inline absl::Status WithReason(absl::Status status, absl::string_view reason) {
  status.SetPayload(kReasonUrl, absl::Cord(reason));
  return status;
}

// Empty if there is none.
inline std::string ReasonOf(const absl::Status& status) {
  const auto reason = status.GetPayload(kReasonUrl);
  return reason.has_value() ? std::string(*reason) : "";
}

}  // namespace epikv
