#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"

// How many guesses of each sequence a step verifies. Pure, but for StepCost, which measures.

namespace epikv {

// How often the guesses of one sequence come true.
class GuessRecord {
 public:
  static constexpr double kUnknown = 0.6;
  // chance: of those before it, as long as nothing is known of its own.
  explicit GuessRecord(double chance = kUnknown) : chance_(chance) {}

  // That one does, if all before it have. In (0, 1).
  double chance() const { return chance_; }
  // Of so many in a row that a step had run, the first `accepted` came true.
  void OnVerified(int64_t run, int64_t accepted);
  // There were guesses, and the step had none of them: what is known of them grows old.
  void OnLeftOut();

 private:
  double chance_;
};

// What one row more adds to a step, of the time that the step takes. Fitted to steps that decode:
// their time is a line over their rows, and older steps weigh less. Where all had as many rows,
// what was known before holds.
class StepCost {
 public:
  void OnStep(int64_t rows, absl::Duration took);
  // Of a step of so many rows.
  double ShareOfRow(int64_t rows) const;
  // Of such a step, what so long a time is; absent: no step was measured.
  std::optional<double> ShareOf(absl::Duration time, int64_t rows) const;
  // Whether a guess of this chance may be worth a row beside so many that decode.
  bool MayPay(double chance, int64_t decoding) const {
    return chance > static_cast<double>(decoding) * ShareOfRow(decoding);
  }

 private:
  // Seconds of a step of so many rows, as far as is known.
  double Expected(double rows) const;
  double Slope() const;

  double weight_ = 0, rows_ = 0, seconds_ = 0;  // sums
  double rows_rows_ = 0, rows_seconds_ = 0;
};

struct Guesses {
  int64_t count = 0;  // that there are
  double chance = 0;  // GuessRecord
};

// How far a draft guesses ahead (Drafter), of sequences whose guesses come true with these chances:
// as long as the tokens that one guess more of each may give are more of all than the time that
// drafting and running them takes is of the step's; at most `most`, and no more in all than `room`.
// While others decode it takes a tenth of the step at most. rows, decoding: of the step without
// guesses. guess_time: Drafter's.
int64_t PlanDrafts(absl::Span<const double> chances, int64_t rows, int64_t decoding, int64_t most,
                   int64_t room, absl::Duration guess_time, const StepCost& cost);

// How many of each sequence's guesses a step takes, so that its tokens come soonest: a row is added
// while the tokens that it may give are more of all than the time that it takes is of the step's.
// While some of those that decode guess nothing, the step grows by a tenth at most for the others'
// guesses. rows: of the step without any; `decoding` of them give a token each. room: for rows.
std::vector<int64_t> PlanGuesses(absl::Span<const Guesses> guesses, int64_t rows, int64_t decoding,
                                 int64_t room, const StepCost& cost);

}  // namespace epikv
