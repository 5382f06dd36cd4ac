#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "policies/spec.h"

namespace epikv {

struct TokenSpan {
  int64_t begin = 0, end = 0;  // indexes, half open
  bool operator==(const TokenSpan&) const = default;
};

// What a request asks to be kept. Absent: the published policy's default, by the rule below.
struct ProtectionOptions {
  // The comparison rule: prompt by the rule, 4 sinks, R. Excludes the others. Absent: as the server
  // says where none of them is given either.
  std::optional<bool> equal;
  std::optional<bool> prompt;
  std::optional<int64_t> sinks;
  std::optional<int64_t> recent;
  std::vector<TokenSpan> spans;
  int64_t thinking = 0;  // the first tokens of the answer's thinking
};

// The tokens that no policy may evict. One owner, the runtime: unequal protection is the classic
// way to cheat in this field.
class Protection {
 public:
  int64_t prompt = 0;  // the first `prompt` tokens; 0: the prompt is not protected as such
  int64_t sinks = 0;
  int64_t recent = 0;  // the newest `recent` tokens, the current one included
  std::vector<TokenSpan> spans;
  int64_t thinking = 0;  // the first tokens of the answer's thinking
  TokenSpan thought;     // where these are, once it is known; before they are cached

  // `newest`: index of the newest cached token.
  bool Covers(int64_t index, int64_t newest) const {
    if (index < prompt || index < sinks || index > newest - recent) return true;
    if (index >= thought.begin && index < thought.end) return true;
    for (const TokenSpan& s : spans) {
      if (index >= s.begin && index < s.end) return true;
    }
    return false;
  }
  // True for tokens protected for good, whatever the newest is.
  bool CoversForever(int64_t index) const { return Covers(index, INT64_MAX / 2); }

  // Most tokens that can be protected at once.
  int64_t Size() const;
  bool operator==(const Protection&) const = default;
};

// The prompt counts as fitting when this much room is left beside it.
inline constexpr int64_t kRoomBesidePrompt = 16;

struct ResolvedProtection {
  Protection protection;
  // Smallest budget under which the request could run; larger than the budget given = refused.
  int64_t smallest_budget = 0;
};

// What the request says, else what the published policy keeps, else the rule (DESIGN section 5):
// the whole prompt is protected whenever prompt + 16 <= budget; recent R = min(128, budget / 4,
// what is left). `budget` in tokens, the prompt included.
ResolvedProtection ResolveProtection(const ProtectionOptions& options, const PolicyTraits& traits,
                                     int64_t prompt_tokens, int64_t budget);

}  // namespace epikv
