#include "runtime/engine/completion_group.h"

#include <algorithm>

namespace epikv {

void CompletionGroup::Add(const Sequence& s, const Finished& closed) {
  total.prompt_tokens = closed.prompt_tokens;
  total.cached_prompt_tokens = closed.cached_prompt_tokens;
  total.output_tokens += closed.output_tokens;
  total.thinking_tokens += closed.thinking_tokens;
  total.guessed_tokens += closed.guessed_tokens;
  total.accepted_tokens += closed.accepted_tokens;
  total.kv_trace_truncated |= closed.kv_trace_truncated;
  total.kv.final_entries += s.open ? closed.kv.final_entries : 0;
  total.kv.packed_bytes += closed.kv.packed_bytes;
  total.kv.reads.read += closed.kv.reads.read;
  total.kv.reads.cached += closed.kv.reads.cached;
  total.kv.tier.Add(closed.kv.tier);
  total.kv.evicted_entries += closed.kv.evicted_entries - (forked ? prompt_evicted : 0);
  total.kv.rounds += closed.kv.rounds - (forked ? prompt_rounds : 0);
  total.timings.queue = closed.timings.queue;
  total.timings.prefill = closed.timings.prefill;
  total.timings.time_to_first_token = closed.timings.time_to_first_token;
  total.timings.decode = std::max(total.timings.decode, closed.timings.decode);
  total.timings.eviction += closed.timings.eviction;
  total.timings.pass = std::max(total.timings.pass, closed.timings.pass);
  if (s.completion != 0) return;
  total.reason = closed.reason;
  total.stop_string = closed.stop_string;
  total.stop_token = closed.stop_token;
  total.kv.kept = closed.kv.kept;
  total.kv.first_rounds = closed.kv.first_rounds;
}

}  // namespace epikv
