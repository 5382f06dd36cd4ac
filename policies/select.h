#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "policies/protection.h"

namespace epikv {

// The `count` unprotected tokens of one lane with the lowest scores; among equal scores the older
// one goes ("newer wins"). scores, index: by slot, equally long. Returns indexes, in no order.
// Fails if a score is NaN or fewer than `count` tokens are unprotected.
absl::StatusOr<std::vector<int32_t>> LowestScores(absl::Span<const float> scores,
                                                  absl::Span<const int32_t> index,
                                                  const Protection& protection, int64_t newest,
                                                  int64_t count);

}  // namespace epikv
