#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace epikv {

// What may come next, by what came before: the newest tokens are looked for in what is already
// there, and what followed them then is the guess (prompt lookup decoding, Saxena 2023; n-gram
// drafting elsewhere). Of several places it is the one where most tokens agree, of these the last.
// Where that is not far back, what followed goes on as it began: again and again.
//
// tokens: prompt and output. `most` guesses; none where fewer than two tokens agree, or
// where the newest `kLookedThrough` tokens have no such place.
inline constexpr int64_t kLookedThrough = 65536;
std::vector<int32_t> LookUpPrompt(absl::Span<const int32_t> tokens, int64_t most);

}  // namespace epikv
