#include "server/metrics/rejected_series.h"

#include <iterator>
#include <string>

#include "absl/strings/ascii.h"

namespace epikv {
namespace {

constexpr absl::string_view kReasons[] = {"invalid_request",
                                          "token_range",
                                          "span_range",
                                          "context_length",
                                          "kv_budget",
                                          "kv_pool_too_small",
                                          "kv_tier_too_small",
                                          "artefact_missing",
                                          "prompt_evicted",
                                          "chat_format",
                                          "packets_off",
                                          "packets_full",
                                          "packet_model",
                                          "sessions_off",
                                          "queue_full",
                                          "starting",
                                          "loading",
                                          "draining",
                                          "duplicate_id",
                                          "not_found",
                                          "not_utf8",
                                          "malformed",
                                          "unauthenticated",
                                          "permission_denied",
                                          "deadline_infeasible",
                                          "other"};

}  // namespace

RejectedSeries::RejectedSeries(Declarations& declare)
    : family_(declare.Counters("epikv_requests_rejected_total",
                               "Requests that were refused before they were queued.",
                               std::size(kReasons))) {}

void RejectedSeries::Count(absl::string_view reason) {
  const std::string lower = absl::AsciiStrToLower(reason);
  family_.Add({{"reason", std::string(KnownOr(kReasons, lower, "other"))}}).Increment();
}

}  // namespace epikv
