#include "runtime/engine/prompt_lookup.h"

#include <algorithm>

namespace epikv {
namespace {

constexpr int64_t kFewestAgree = 2;
// More that agree are no better a sign.
constexpr int64_t kMostAgree = 8;

}  // namespace

std::vector<int32_t> LookUpPrompt(absl::Span<const int32_t> tokens, int64_t most) {
  if (std::ssize(tokens) > kLookedThrough) tokens = tokens.last(kLookedThrough);
  const int64_t size = std::ssize(tokens);
  if (most <= 0 || size <= kFewestAgree) return {};
  int64_t best = kFewestAgree - 1, next = 0;
  // `end` is behind a place where the newest token was before.
  for (int64_t end = size - 1; end >= kFewestAgree && best < kMostAgree; --end) {
    if (tokens[end - 1] != tokens[size - 1]) continue;
    int64_t agree = 1;
    while (agree < kMostAgree && agree < end &&
           tokens[end - 1 - agree] == tokens[size - 1 - agree]) {
      ++agree;
    }
    if (agree > best) {
      best = agree;
      next = end;
    }
  }
  if (next == 0) return {};
  std::vector<int32_t> guesses;
  for (int64_t i = next; std::ssize(guesses) < most; ++i) {
    guesses.push_back(i < size ? tokens[i] : guesses[i - size]);
  }
  return guesses;
}

}  // namespace epikv
