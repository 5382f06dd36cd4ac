#pragma once

#include <cstdint>
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
};

// What the scheduler knows of one running sequence.
struct SequenceView {
  int64_t prefill_tokens = 0;  // to cache before the first output
  int64_t cached_tokens = 0;
  bool ready = true;  // false: its client does not read; it is left out
  absl::string_view tenant;
};

struct PlannedItem {
  int64_t sequence = 0;  // place in the span given to Plan
  int64_t num_tokens = 0;
};

// The most tokens a step can have.
int64_t MostStepTokens(const SchedulerOptions& options, int64_t max_running_requests);

// Every ready decoding sequence, then prompt chunks in the room left: the oldest prompt of each
// tenant, then the second of each, and so on, the older one first. Of a step with room for several
// prompts, one tenant's do not take it all; where one prompt fills it, the oldest of all goes
// first. Pure.
std::vector<PlannedItem> Plan(absl::Span<const SequenceView> running,
                              const SchedulerOptions& options);

}  // namespace epikv
