#include "runtime/engine/scheduler.h"

#include <algorithm>
#include <compare>
#include <cstddef>
#include <iterator>
#include <string_view>

#include "absl/algorithm/container.h"

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
  const int64_t chunk = std::min({left, to_boundary, options.fixed_chunk_tokens});
  return chunk <= room ? chunk : 0;
}

// Left for prefill beside `decoding` tokens.
int64_t PrefillRoom(int64_t decoding, const SchedulerOptions& options) {
  return std::max(
      {options.max_step_tokens - decoding, kLeastPrefillTokens, options.fixed_chunk_tokens});
}

bool IsPrompt(const SequenceView& sequence) {
  return sequence.cached_tokens < sequence.prefill_tokens;
}

// Places of the ready prompts in the order in which they are served.
std::vector<int64_t> PromptsInTurn(absl::Span<const SequenceView> running) {
  struct Prompt {
    int64_t older, turn, place;  // older: of its tenant
    auto operator<=>(const Prompt&) const = default;
  };
  std::vector<Prompt> prompts;
  std::unordered_map<std::string_view, int64_t> of_tenant;
  for (size_t i = 0; i < running.size(); ++i) {
    const SequenceView& s = running[i];
    if (!s.ready || !IsPrompt(s)) continue;
    prompts.push_back({.older = of_tenant[{s.tenant.data(), s.tenant.size()}]++,
                       .turn = s.turn,
                       .place = static_cast<int64_t>(i)});
  }
  absl::c_sort(prompts);
  std::vector<int64_t> places;
  places.reserve(prompts.size());
  for (const Prompt& prompt : prompts) places.push_back(prompt.place);
  return places;
}

}  // namespace

int64_t MostStepTokens(const SchedulerOptions& options, int64_t max_running_requests) {
  // One request prefills beside the others.
  const int64_t decoding = max_running_requests - 1;
  return std::max(max_running_requests, decoding + PrefillRoom(decoding, options));
}

std::vector<PlannedItem> Plan(absl::Span<const SequenceView> running,
                              const SchedulerOptions& options) {
  std::vector<PlannedItem> plan;
  for (size_t i = 0; i < running.size(); ++i) {
    const SequenceView& s = running[i];
    if (s.ready && !IsPrompt(s)) {
      plan.push_back({.sequence = static_cast<int64_t>(i), .num_tokens = 1});
    }
  }
  int64_t room = PrefillRoom(static_cast<int64_t>(plan.size()), options);
  for (const int64_t place : PromptsInTurn(running)) {
    const int64_t chunk = NextChunk(running[place], room, options);
    if (chunk == 0) break;  // nobody overtakes whose chunk happens to fit
    plan.push_back({.sequence = place, .num_tokens = chunk});
    room -= chunk;
  }
  return plan;
}

std::vector<int64_t> WithoutRoom(absl::Span<const SequenceView> running,
                                 absl::Span<const PlannedItem> plan, int64_t max_round_pairs) {
  std::vector<PlannedItem> rounds;
  absl::c_copy_if(plan, std::back_inserter(rounds),
                  [](const PlannedItem& item) { return item.round_pairs > 0; });
  absl::c_stable_sort(rounds, [&](const PlannedItem& a, const PlannedItem& b) {
    return running[a.sequence].last_step < running[b.sequence].last_step;
  });
  std::vector<int64_t> out;
  double pairs = 0;
  for (const PlannedItem& item : rounds) {
    const bool first = pairs == 0;
    pairs += static_cast<double>(item.round_pairs);
    if (!first && pairs > static_cast<double>(max_round_pairs)) out.push_back(item.sequence);
  }
  return out;
}

void PrefillTurns::Set(absl::Span<SequenceView> running) {
  time_ += 2;
  std::unordered_map<std::string, int64_t> now;
  for (SequenceView& s : running) {
    if (!IsPrompt(s)) continue;
    const auto [entry, first] = now.try_emplace(std::string(s.tenant), time_);
    if (first) {
      if (const auto known = last_.find(entry->first); known != last_.end()) {
        entry->second = known->second;
      }
    }
    s.turn = entry->second;
  }
  last_.swap(now);
}

void PrefillTurns::OnPlanned(absl::Span<const SequenceView> running,
                             absl::Span<const PlannedItem> plan) {
  for (const PlannedItem& item : plan) {
    const SequenceView& s = running[item.sequence];
    if (IsPrompt(s)) last_[std::string(s.tenant)] = time_ + 1;  // behind who came
  }
}

}  // namespace epikv
