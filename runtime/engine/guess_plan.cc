#include "runtime/engine/guess_plan.h"

#include <algorithm>
#include <utility>

namespace epikv {
namespace {

// Of chances: what one guess weighs, and how fast a record that nobody asks is forgotten.
constexpr double kNewest = 0.1, kForgotten = 0.002;
constexpr double kLeastChance = 0.02, kMostChance = 0.98;

// Of steps: what older ones lose with each; and what a row's share is taken to be before any step
// had another number of rows, with the weight of so many steps.
constexpr double kKept = 0.995, kPriorShare = 0.03, kPriorWeight = 2;
// What a row costs at least; and what a step counts at most, of what was expected of it: the
// process may have stood still.
constexpr double kLeastShare = 0.005, kMostOfGuess = 8;
// What one guess more of a draft is taken to be of a step before both were measured.
constexpr double kPriorDraft = 0.1;
// By how much a step grows for some of its sequences alone.
constexpr double kForOthers = 0.1;

}  // namespace

void GuessRecord::OnVerified(int64_t run, int64_t accepted) {
  for (int64_t i = 0; i < std::min(run, accepted + 1); ++i) {
    chance_ += kNewest * ((i < accepted ? 1.0 : 0.0) - chance_);
  }
  chance_ = std::clamp(chance_, kLeastChance, kMostChance);
}

void GuessRecord::OnLeftOut() { chance_ += kForgotten * (kUnknown - chance_); }

void StepCost::OnStep(int64_t rows, absl::Duration took) {
  const double r = static_cast<double>(rows);
  double s = absl::ToDoubleSeconds(took);
  if (weight_ >= 1) s = std::min(s, kMostOfGuess * Expected(r));
  for (double* sum : {&weight_, &rows_, &seconds_, &rows_rows_, &rows_seconds_}) *sum *= kKept;
  weight_ += 1;
  rows_ += r;
  seconds_ += s;
  rows_rows_ += r * r;
  rows_seconds_ += r * s;
}

double StepCost::Slope() const {
  const double mean_rows = rows_ / weight_, mean_seconds = seconds_ / weight_;
  const double apart = rows_rows_ - rows_ * mean_rows;
  const double together = rows_seconds_ - seconds_ * mean_rows;
  return std::max((together + kPriorWeight * kPriorShare * mean_seconds) / (apart + kPriorWeight),
                  0.0);
}

double StepCost::Expected(double rows) const {
  return std::max((seconds_ + Slope() * (rows * weight_ - rows_)) / weight_, Slope());
}

double StepCost::ShareOfRow(int64_t rows) const {
  if (weight_ == 0 || seconds_ <= 0) return kPriorShare;
  return std::max(Slope() / Expected(static_cast<double>(rows)), kLeastShare);
}

std::optional<double> StepCost::ShareOf(absl::Duration time, int64_t rows) const {
  if (weight_ == 0 || seconds_ <= 0) return std::nullopt;
  return absl::ToDoubleSeconds(time) / Expected(static_cast<double>(rows));
}

int64_t PlanDrafts(absl::Span<const double> chances, int64_t rows, int64_t decoding, int64_t most,
                   int64_t room, absl::Duration guess_time, const StepCost& cost) {
  // In units of the step without guesses.
  const double draft = guess_time == absl::ZeroDuration()
                           ? kPriorDraft
                           : cost.ShareOf(guess_time, rows).value_or(kPriorDraft);
  const double each = draft + static_cast<double>(chances.size()) * cost.ShareOfRow(rows);
  std::vector<double> comes(chances.begin(), chances.end());  // that all guesses so far come true
  const auto count = static_cast<int64_t>(chances.size());
  most = std::min(most, room / count);
  if (decoding > count) most = std::min(most, static_cast<int64_t>(kForOthers / each));
  auto tokens = static_cast<double>(decoding);
  double time = 1;
  for (int64_t depth = 0; depth < most; ++depth) {
    double more = 0;
    for (size_t i = 0; i < comes.size(); ++i) {
      more += comes[i];
      comes[i] *= chances[i];
    }
    if (more / tokens <= each / time) return depth;
    tokens += more;
    time += each;
  }
  return most;
}

std::vector<int64_t> PlanGuesses(absl::Span<const Guesses> guesses, int64_t rows, int64_t decoding,
                                 int64_t room, const StepCost& cost) {
  std::vector<int64_t> taken(guesses.size());
  std::vector<std::pair<double, size_t>> next;  // a heap: the chance that a row gives a token
  for (size_t i = 0; i < guesses.size(); ++i) {
    if (guesses[i].count > 0) next.emplace_back(guesses[i].chance, i);
  }
  std::make_heap(next.begin(), next.end());
  auto tokens = static_cast<double>(decoding);
  const int64_t others = decoding - std::ssize(next);
  if (others > 0) {
    const double most = kForOthers / cost.ShareOfRow(rows);
    room = std::min(room, static_cast<int64_t>(most));
  }
  while (!next.empty() && room > 0) {
    const auto [chance, i] = next.front();
    if (chance <= tokens * cost.ShareOfRow(rows)) break;
    std::pop_heap(next.begin(), next.end());
    next.pop_back();
    ++taken[i];
    ++rows;
    --room;
    tokens += chance;
    if (taken[i] == guesses[i].count) continue;
    next.emplace_back(chance * guesses[i].chance, i);
    std::push_heap(next.begin(), next.end());
  }
  return taken;
}

}  // namespace epikv
