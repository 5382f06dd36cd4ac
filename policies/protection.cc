#include "policies/protection.h"

#include <algorithm>

namespace epikv {
namespace {

constexpr int64_t kEqualSinks = 4;
constexpr int64_t kMostRecent = 128;

}  // namespace

int64_t Protection::Size() const {
  // Tokens protected for good, counted once however many rules name them.
  const int64_t front = std::max(prompt, sinks);
  int64_t size = front + recent + thinking;
  std::vector<TokenSpan> sorted = spans;
  std::sort(sorted.begin(), sorted.end(),
            [](const TokenSpan& a, const TokenSpan& b) { return a.begin < b.begin; });
  int64_t counted_to = front;
  for (const TokenSpan& span : sorted) {
    size += std::max<int64_t>(0, span.end - std::max(span.begin, counted_to));
    counted_to = std::max(counted_to, span.end);
  }
  return size;
}

ResolvedProtection ResolveProtection(const ProtectionOptions& options, const PolicyTraits& traits,
                                     int64_t prompt_tokens, int64_t budget) {
  const bool fits = prompt_tokens + kRoomBesidePrompt <= budget;
  ResolvedProtection resolved;
  Protection& p = resolved.protection;
  const PublishedProtection published =
      options.equal.value_or(false) ? PublishedProtection{.sinks = kEqualSinks} : traits.published;
  p.prompt = options.prompt.value_or(published.prompt && fits) ? prompt_tokens : 0;
  p.sinks = options.sinks.value_or(published.sinks);
  p.spans = options.spans;
  p.thinking = options.thinking;

  const int64_t fixed = p.Size();
  const int64_t room = std::max<int64_t>(0, budget - fixed);
  const int64_t wanted =
      published.recent_share.has_value()
          ? static_cast<int64_t>(*published.recent_share * static_cast<double>(budget))
          : published.recent.value_or(std::min(kMostRecent, budget / 4));
  // The current token always survives its own round, or the model would never have said it.
  const int64_t least_recent = options.recent.value_or(1);
  resolved.smallest_budget = fixed + least_recent;
  const int64_t fitting = prompt_tokens + kRoomBesidePrompt;
  if (!fits && (traits.prompt == PromptEviction::kRefuses || resolved.smallest_budget >= fitting)) {
    // Only a budget that the prompt fits will do, and there the prompt may be protected too.
    Protection there = p;
    there.prompt = options.prompt.value_or(published.prompt) ? prompt_tokens : 0;
    resolved.smallest_budget = std::max(fitting, there.Size() + least_recent);
  }
  p.recent = options.recent.value_or(std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, room)));
  return resolved;
}

}  // namespace epikv
