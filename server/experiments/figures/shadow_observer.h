#pragma once

#include <cstdint>

#include "absl/time/time.h"
#include "epikv/v1/experiment_record.pb.h"
#include "server/experiments/figures/divergence.h"

namespace epikv {

// What became of the replay of a sampled request, or of a pair.
enum class ShadowFate {
  kCompared,
  kDisplaced,    // newer ones took its place before there was time for it
  kInterrupted,  // live requests came whenever it was tried
  kFailed,       // too long, nothing to compare, no room in the pool, or its model has gone
};

// Of both answers to one prompt.
struct PairFound {
  Divergence shown, hidden;
};

// Told what a Shadow does. Any thread; must not block.
class ShadowObserver {
 public:
  virtual ~ShadowObserver() = default;
  // found: of kCompared.
  virtual void OnShadow(const v1::RequestBegan& began, ShadowFate fate, const Divergence& found) {}
  // The same of a pair, which is of the one part that has a pair_arm.
  virtual void OnPair(const v1::RequestBegan& began, ShadowFate fate, const PairFound& found) {}
  // Requests that wait in memory.
  virtual void OnShadowWaiting(int64_t requests) {}
  // An engine was used for so long; interrupted: and gave way to a live request.
  virtual void OnShadowTime(absl::Duration spent, bool interrupted) {}
};

}  // namespace epikv
