#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
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
  int64_t turn = 0;   // of its prompt's next token: the lowest first
};

struct PlannedItem {
  int64_t sequence = 0;  // place in the span given to Plan
  int64_t num_tokens = 0;
};

// The most tokens a step can have.
int64_t MostStepTokens(const SchedulerOptions& options, int64_t max_running_requests);

// Whose prompt is read next: as if each tenant had a reader of his own, all of one speed, and each
// read his prompts one after the other. One tenant's prompts do not hold up another's. A prompt's
// turn is how far its reader has come by then, in tokens; its tokens follow one by one (start-time
// fair queueing: Goyal, Vin and Cheng, SIGCOMM 1996). Not thread-safe.
class PrefillTurns {
 public:
  // Of the first token of a prompt of which so many are to be cached. It is admitted now.
  int64_t Take(const std::string& tenant, int64_t tokens);
  // A token of this turn is the first of a step: who comes now begins no sooner.
  void Reach(int64_t turn);

 private:
  int64_t now_ = 0;
  // Of who has taken turns beyond now_: the next free one.
  absl::flat_hash_map<std::string, int64_t> next_;
};

// Every ready decoding sequence, then prompt chunks in the room left, in turn, of equal turns the
// older one first. Pure.
std::vector<PlannedItem> Plan(absl::Span<const SequenceView> running,
                              const SchedulerOptions& options);

}  // namespace epikv
