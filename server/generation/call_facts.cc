#include "server/generation/call_facts.h"

#include <grpcpp/server_context.h>

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "runtime/base/steady_time.h"
#include "server/experiments/participation.h"
#include "server/metrics/request_series.h"

namespace epikv {

namespace {

// To microseconds: digits take room in a line.
double RoundedSeconds(absl::Duration time) {
  return static_cast<double>(absl::ToInt64Microseconds(time)) / 1e6;
}

}  // namespace

absl::Status WhyCancelled(const CallTimes& times) {
  constexpr absl::Duration kMostEarly = absl::Milliseconds(250);
  const absl::Duration rounded = (times.deadline - times.start) / 100 + absl::Milliseconds(50);
  if (times.deadline - std::min(rounded, kMostEarly) <= times.now) {
    return absl::DeadlineExceededError("the deadline has passed");
  }
  return absl::CancelledError("the client has gone");
}

absl::Status WhyCancelledNow(const CallScope& scope) {
  return WhyCancelled({.start = scope.start(), .deadline = scope.deadline(), .now = SteadyNow()});
}

void AddPushback(grpc::CallbackServerContext& context, std::optional<absl::Duration> retry_after) {
  if (!retry_after.has_value()) return;
  context.AddTrailingMetadata("grpc-retry-pushback-ms",
                              absl::StrCat(absl::ToInt64Milliseconds(*retry_after)));
}

void LogAccepted(const v1::Accepted& accepted, v1::AccessLogEntry& entry) {
  entry.set_request_id(ForLog(accepted.request_id()));
  entry.set_model(ForLog(accepted.model()));
  entry.set_policy(accepted.kv().policy());
  entry.set_budget_tokens(accepted.kv().budget_tokens());
  entry.set_prompt_tokens(accepted.prompt_tokens());
  if (accepted.arm() != kNoArm) entry.set_arm(accepted.arm());
}

void LogFinished(const Finished& finished, int64_t lanes, v1::AccessLogEntry& entry) {
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
  entry.set_eviction_seconds(absl::ToDoubleSeconds(timings.eviction));
  for (const RoundTime& round : finished.kv.first_rounds) {
    v1::AccessLogEntry::EvictionRound& told = *entry.add_eviction_rounds();
    told.set_end_seconds(RoundedSeconds(round.end));
    told.set_seconds(RoundedSeconds(round.time));
    told.set_evicted_tokens(round.entries / lanes);
  }
}

}  // namespace epikv
