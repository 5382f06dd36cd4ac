#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "policies/protection.h"

namespace epikv {

constexpr float kNoThreshold = -std::numeric_limits<float>::infinity();

// The `count` unprotected tokens of one lane with the lowest scores; among equal scores the older
// one goes ("newer wins"). scores, index: by slot, equally long. Returns indexes, in no order.
// Fails if a score is NaN or fewer than `count` tokens are unprotected. With a threshold all the
// others below it go too.
absl::StatusOr<std::vector<int32_t>> LowestScores(absl::Span<const float> scores,
                                                  absl::Span<const int32_t> index,
                                                  const Protection& protection, int64_t newest,
                                                  int64_t count, float threshold = kNoThreshold);

struct ScoredLane {
  absl::Span<const float> scores;
  absl::Span<const int32_t> index;
};

// The same over several lanes that share a budget: `count` entries in all. A lane keeps `floor`
// tokens at least, or all it has: the protected ones and its own best. Returns indexes by lane;
// among equal scores of one token the first lane's goes.
absl::StatusOr<std::vector<std::vector<int32_t>>> LowestScoresOfPool(
    absl::Span<const ScoredLane> lanes, const Protection& protection, int64_t newest, int64_t count,
    int64_t floor, float threshold = kNoThreshold);

// Scores for a draw without replacement: keeping the highest of these keeps each set of tokens as
// often as drawing one after another would, with probability proportional to `mass` (>= 0; tokens
// of none come last, the newer ones first). Gumbel-top-k: log(mass) + a Gumbel number by index.
std::vector<float> DrawnScores(absl::Span<const float> mass, absl::Span<const int32_t> index,
                               uint64_t seed, uint64_t stream);

}  // namespace epikv
