#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <vector>

#include "absl/types/span.h"

// Guard: what may go while a prediction, which may be wrong, says what should (arXiv 2507.16242,
// algorithm 1; OptiSys-ZJU/Cache-Coliseum 4568bb6, `Guard.access`). Without torch.

namespace epikv {

struct GuardOptions {
  bool follow_if_guarded = false;  // also where the prediction was wrong, it says who goes
  int64_t relax_times = 0;  // only its so many-th error of a phase, and those after it, count
  double relax_prob = 0;    // where relax_times is 0: with this probability an error does not count
};

// Of one cache that is full. Tokens are known by number: their slots move. In a phase tokens are
// old until they are asked for, and guarded if they were asked for after they had gone in the same
// phase. A phase ends when no token is old.
class Guard {
 public:
  // Numbers in [0, 1).
  using Draw = std::function<double()>;
  // Which of these is to go.
  using Predict = std::function<int32_t(absl::Span<const int32_t>)>;

  explicit Guard(GuardOptions options) : options_(options) {}

  // A token that is in the cache is asked for.
  void Hit(int32_t token);
  // One that is not is asked for, and comes. Which of `cached` (not empty, in any order, each once)
  // makes room.
  int32_t Miss(int32_t token, absl::Span<const int32_t> cached, const Predict& predict,
               const Draw& draw);

  // The parts of a miss, for who drops several at once. Begins a phase if there is none: of
  // `cached` the prediction may drop all, and chance those in `may_go`.
  void BeginIfOver(absl::Span<const int32_t> cached, absl::Span<const int32_t> may_go);
  // Whether a token that comes is guarded: it went in this phase, and that counts.
  bool Guards(int32_t token, const Draw& draw);
  // An old token by chance. Requires: there is one.
  int32_t Chance(const Draw& draw) const;
  bool has_old() const { return !old_.empty(); }
  void Drop(int32_t victim);
  void Add(int32_t token) { unguarded_.push_back(token); }  // one that is not guarded
  // Tokens that have left the cache without this, [begin, end).
  void Forget(int32_t begin, int32_t end);

  // Those that the prediction may drop.
  const std::vector<int32_t>& unguarded() const { return unguarded_; }

 private:
  GuardOptions options_;
  std::vector<int32_t> old_, unguarded_;
  std::set<int32_t> gone_;  // in this phase
  int64_t errors_ = 0;      // in this phase
};

}  // namespace epikv
