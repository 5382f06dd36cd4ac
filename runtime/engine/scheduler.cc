#include "runtime/engine/scheduler.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_map.h"

namespace epikv {
namespace {

// Even when decoding fills a step, prefill advances by at least this much, or by one fixed chunk:
// nobody waits for ever.
constexpr int64_t kLeastPrefillTokens = 16;

// Tokens of the next prefill chunk that fit into `room`; 0 if none.
int64_t NextChunk(const SequenceView& sequence, int64_t room, const SchedulerOptions& options) {
  const int64_t left = sequence.prefill_tokens - sequence.cached_tokens;
  const int64_t to_boundary =
      options.prefill_chunk_tokens - sequence.cached_tokens % options.prefill_chunk_tokens;
  if (options.fixed_chunk_tokens == 0) return std::min({left, to_boundary, room});
  const int64_t chunk = std::min(left, options.fixed_chunk_tokens);
  return chunk <= room ? chunk : 0;
}

// Left for prefill beside `decoding` tokens.
int64_t PrefillRoom(int64_t decoding, const SchedulerOptions& options) {
  return std::max(
      {options.max_step_tokens - decoding, kLeastPrefillTokens, options.fixed_chunk_tokens});
}

// Ready prompts in the order in which they are served: the turn of each, and its place.
std::vector<std::pair<int64_t, int64_t>> PromptsInTurn(absl::Span<const SequenceView> running) {
  std::vector<std::pair<int64_t, int64_t>> prompts;
  for (size_t i = 0; i < running.size(); ++i) {
    const SequenceView& s = running[i];
    if (s.ready && s.cached_tokens < s.prefill_tokens) prompts.emplace_back(s.turn, i);
  }
  absl::c_sort(prompts);
  return prompts;
}

}  // namespace

int64_t MostStepTokens(const SchedulerOptions& options, int64_t max_running_requests) {
  // One request prefills beside the others.
  const int64_t decoding = max_running_requests - 1;
  return std::max(max_running_requests, decoding + PrefillRoom(decoding, options));
}

int64_t PrefillTurns::Take(const std::string& tenant, int64_t tokens) {
  const auto next = next_.find(tenant);
  const int64_t turn = next == next_.end() ? now_ : next->second;
  if (tokens > 0) next_.insert_or_assign(tenant, turn + tokens);
  return turn;
}

void PrefillTurns::Reach(int64_t turn) {
  if (turn <= now_) return;
  now_ = turn;
  absl::erase_if(next_, [this](const auto& next) { return next.second <= now_; });
}

std::vector<PlannedItem> Plan(absl::Span<const SequenceView> running,
                              const SchedulerOptions& options) {
  std::vector<PlannedItem> plan;
  for (size_t i = 0; i < running.size(); ++i) {
    const SequenceView& s = running[i];
    if (s.ready && s.cached_tokens >= s.prefill_tokens) {
      plan.push_back({.sequence = static_cast<int64_t>(i), .num_tokens = 1});
    }
  }
  int64_t room = PrefillRoom(static_cast<int64_t>(plan.size()), options);
  for (const auto& [turn, place] : PromptsInTurn(running)) {
    const int64_t chunk = NextChunk(running[place], room, options);
    if (chunk == 0) break;  // nobody overtakes whose chunk happens to fit
    plan.push_back({.sequence = place, .num_tokens = chunk});
    room -= chunk;
  }
  return plan;
}

}  // namespace epikv
