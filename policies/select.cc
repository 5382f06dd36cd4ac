#include "policies/select.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "policies/random.h"

namespace epikv {
namespace {

using Candidate = std::pair<float, int32_t>;  // (score, index): pairs order as victims do

// The unprotected tokens of a lane.
absl::StatusOr<std::vector<Candidate>> Candidates(absl::Span<const float> scores,
                                                  absl::Span<const int32_t> index,
                                                  const Protection& protection, int64_t newest) {
  std::vector<Candidate> candidates;
  candidates.reserve(scores.size());
  for (size_t slot = 0; slot < scores.size(); ++slot) {
    if (protection.Covers(index[slot], newest)) continue;
    if (std::isnan(scores[slot])) {
      return absl::InternalError(absl::StrCat("the score of token ", index[slot], " is NaN"));
    }
    candidates.emplace_back(scores[slot], index[slot]);
  }
  return candidates;
}

// How many scores, the first members of `open`, are below the threshold.
template <typename T>
int64_t Below(const std::vector<T>& open, float threshold) {
  return std::count_if(open.begin(), open.end(),
                       [=](const T& entry) { return std::get<0>(entry) < threshold; });
}

absl::Status TooFew(int64_t count, int64_t candidates) {
  return absl::InternalError(absl::StrCat(count, " tokens must go but only ", candidates, " may"));
}

}  // namespace

absl::StatusOr<std::vector<int32_t>> LowestScores(absl::Span<const float> scores,
                                                  absl::Span<const int32_t> index,
                                                  const Protection& protection, int64_t newest,
                                                  int64_t count, float threshold) {
  absl::StatusOr<std::vector<Candidate>> candidates = Candidates(scores, index, protection, newest);
  if (!candidates.ok()) return candidates.status();
  const int64_t open = static_cast<int64_t>(candidates->size());
  if (open < count) return TooFew(count, open);
  count = std::max(count, Below(*candidates, threshold));
  std::nth_element(candidates->begin(), candidates->begin() + count, candidates->end());
  std::vector<int32_t> victims;
  victims.reserve(count);
  for (int64_t i = 0; i < count; ++i) victims.push_back((*candidates)[i].second);
  return victims;
}

absl::StatusOr<std::vector<std::vector<int32_t>>> LowestScoresOfPool(
    absl::Span<const ScoredLane> lanes, const Protection& protection, int64_t newest, int64_t count,
    int64_t floor, float threshold) {
  std::vector<std::tuple<float, int32_t, size_t>> open;  // (score, index, lane)
  for (size_t lane = 0; lane < lanes.size(); ++lane) {
    absl::StatusOr<std::vector<Candidate>> candidates =
        Candidates(lanes[lane].scores, lanes[lane].index, protection, newest);
    if (!candidates.ok()) return candidates.status();
    const int64_t size = static_cast<int64_t>(candidates->size());
    const int64_t held = static_cast<int64_t>(lanes[lane].index.size());
    // The protected ones count for the floor; the best of the others fill it.
    const int64_t kept = std::clamp<int64_t>(floor - (held - size), 0, size);
    std::nth_element(candidates->begin(), candidates->begin() + kept, candidates->end(),
                     std::greater<>());
    for (int64_t i = kept; i < size; ++i) {
      open.emplace_back((*candidates)[i].first, (*candidates)[i].second, lane);
    }
  }
  if (static_cast<int64_t>(open.size()) < count) {
    return TooFew(count, static_cast<int64_t>(open.size()));
  }
  count = std::max(count, Below(open, threshold));
  std::nth_element(open.begin(), open.begin() + count, open.end());
  std::vector<std::vector<int32_t>> victims(lanes.size());
  for (int64_t i = 0; i < count; ++i) {
    victims[std::get<2>(open[i])].push_back(std::get<1>(open[i]));
  }
  return victims;
}

std::vector<float> DrawnScores(absl::Span<const float> mass, absl::Span<const int32_t> index,
                               uint64_t seed, uint64_t stream) {
  const CounterRng rng(seed, stream);
  std::vector<float> scores(mass.size());
  for (size_t slot = 0; slot < scores.size(); ++slot) {
    const double uniform =  // in (0, 1)
        std::min(rng.Uniform(index[slot]) + 0x1p-54, 1 - 0x1p-53);
    scores[slot] = static_cast<float>(std::log(mass[slot]) - std::log(-std::log(uniform)));
  }
  return scores;
}

}  // namespace epikv
