#include "policies/select.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace epikv {

absl::StatusOr<std::vector<int32_t>> LowestScores(absl::Span<const float> scores,
                                                  absl::Span<const int32_t> index,
                                                  const Protection& protection, int64_t newest,
                                                  int64_t count) {
  std::vector<std::pair<float, int32_t>> candidates;  // (score, index): pairs order as victims do
  candidates.reserve(scores.size());
  for (size_t slot = 0; slot < scores.size(); ++slot) {
    if (protection.Covers(index[slot], newest)) continue;
    if (std::isnan(scores[slot])) {
      return absl::InternalError(absl::StrCat("the score of token ", index[slot], " is NaN"));
    }
    candidates.emplace_back(scores[slot], index[slot]);
  }
  if (static_cast<int64_t>(candidates.size()) < count) {
    return absl::InternalError(
        absl::StrCat(count, " tokens must go but only ", candidates.size(), " are unprotected"));
  }
  std::nth_element(candidates.begin(), candidates.begin() + count, candidates.end());
  std::vector<int32_t> victims;
  victims.reserve(count);
  for (int64_t i = 0; i < count; ++i) victims.push_back(candidates[i].second);
  return victims;
}

}  // namespace epikv
