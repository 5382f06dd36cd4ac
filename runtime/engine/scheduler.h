#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace epikv {

struct SchedulerOptions {
  // A step may exceed it where decoding leaves prefill less than 16 tokens, or one fixed chunk.
  int64_t max_step_tokens = 512;
  // Prefill evictions happen at its multiples, counted from the request's start; a chunk never
  // crosses one, so what is kept does not depend on the neighbours.
  int64_t prefill_chunk_tokens = 256;
  // Not 0: prefill runs in whole chunks of this many tokens (the last one shorter), so that a
  // request's bits do not depend on its batch. Divides prefill_chunk_tokens.
  int64_t fixed_chunk_tokens = 0;
  // Most pairs of tokens that the rounds of one step may compare, all together.
  int64_t max_round_pairs = std::numeric_limits<int64_t>::max();
};

// What the scheduler knows of one running sequence.
struct SequenceView {
  int64_t prefill_tokens = 0;  // to cache before the first output
  int64_t cached_tokens = 0;
  bool ready = true;  // false: it is left out, as its client does not read, say
  absl::string_view tenant;
  int64_t turn = 0;       // of its tenant, whose prompts are read by turns: see PrefillTurns
  int64_t last_step = 0;  // number of the last step that it was in, or came after
};

struct PlannedItem {
  int64_t sequence = 0;  // place in the span given to Plan
  int64_t num_tokens = 0;
  int64_t round_pairs = 0;  // pairs of tokens that its round, if it may have one, may compare
};

// The most tokens a step can have.
int64_t MostStepTokens(const SchedulerOptions& options, int64_t max_running_requests);

// Every ready decoding sequence, then prompt chunks in the room left: the oldest prompt of each
// tenant, by the tenants' turns, then the second of each, and so on. Pure.
std::vector<PlannedItem> Plan(absl::Span<const SequenceView> running,
                              const SchedulerOptions& options);

// Places of those of the plan for whose rounds the step has no room. Who has waited longest goes
// first; one whose round takes more than all may take has a step without others' rounds.
std::vector<int64_t> WithoutRoom(absl::Span<const SequenceView> running,
                                 absl::Span<const PlannedItem> plan, int64_t max_round_pairs);

// Tenants whose prompts are to be read take turns: first who has waited longest since a prompt of
// his was read, or since he came. So of T tenants each is read in one of T steps at least, however
// many prompts the others have, and however long. Not thread-safe.
class PrefillTurns {
 public:
  // At each step: sets the turns. Tenants that have no prompt left are forgotten.
  void Set(absl::Span<SequenceView> running);
  // What the step reads.
  void OnPlanned(absl::Span<const SequenceView> running, absl::Span<const PlannedItem> plan);

 private:
  int64_t time_ = 0;  // two a step
  // When a tenant's prompt was read last, or he came. (absl's maps break when memory runs out.)
  std::unordered_map<std::string, int64_t> last_;
};

}  // namespace epikv
