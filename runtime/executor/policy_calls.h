#pragma once

#include <exception>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "policies/policy.h"
#include "runtime/base/reason.h"
#include "runtime/request/request.h"
#include "runtime/signals/signals.h"
#include "runtime/step/step_item.h"

// Calls of a request's policy. Whatever a policy throws, or answers wrongly, ends its own request
// with POLICY_FAILED and nothing else.

namespace epikv {

// INTERNAL, whatever the policy says: nothing was wrong with the request.
absl::Status PolicyFailure(const Request& request, absl::string_view kind, absl::string_view why);

// Runs a policy's own code: whatever it throws is its failure.
template <class Call>
absl::Status AskPolicy(const Request& request, Call call) {
  try {
    call();
    return absl::OkStatus();
  } catch (const std::exception& e) {
    return PolicyFailure(request, kPolicyThrew, e.what());
  } catch (...) {
    return PolicyFailure(request, kPolicyThrew, kNoException);
  }
}

// Tells the policy what the step has cached.
absl::Status ObserveStep(OpenSequence& sequence, const WorkItem& item, CacheView& view);

// What is wrong with the segments of a policy's scratch pass.
absl::Status CheckSegments(const Request& request,
                           const std::vector<std::vector<int32_t>>& segments, int64_t vocab_size);

// Asks the policy what the copy leaves out over which tokens are told ahead; checks that what is
// left fits into it.
absl::StatusOr<SequenceCache::Slots> AskDraft(OpenSequence& sequence, CacheView& view);

// Asks the policy what goes, and drops it. mass_rows: the newest query's attention over all lanes,
// where SettleOutcome::attention_mass is to be measured; null: it is not.
absl::Status RunRound(OpenSequence& sequence, const WorkItem& item, CacheView& view,
                      const LaneRowsOfStep* mass_rows, SettleOutcome& outcome);

// Drops an answer's thinking, whatever the policy thinks of it, and tells it.
absl::Status EvictThinking(OpenSequence& sequence, TokenSpan thinking, SettleOutcome& outcome);

}  // namespace epikv
