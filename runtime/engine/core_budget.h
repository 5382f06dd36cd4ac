#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace epikv {

// The cores that the engines of a process share. A step takes as many as its engine has threads,
// first come, first served: busy engines take turns step by step, and an idle one takes nothing.
// Thread-safe.
class CoreBudget {
 public:
  explicit CoreBudget(int64_t cores) : cores_(cores), free_(cores) {}

  // Cores until its end.
  class Lease {
   public:
    Lease(Lease&& other) noexcept : budget_(other.budget_), cores_(other.cores_) {
      other.budget_ = nullptr;
    }
    ~Lease() {
      if (budget_ != nullptr) budget_->GiveBack(cores_);
    }
    Lease& operator=(Lease&&) = delete;

   private:
    friend class CoreBudget;
    Lease(CoreBudget* budget, int64_t cores) : budget_(budget), cores_(cores) {}
    CoreBudget* budget_;
    int64_t cores_;
  };

  // Blocks until they are free. Who asks for more than there are gets all.
  Lease Take(int64_t cores) {
    cores = std::min(cores, cores_);
    absl::MutexLock lock(&mu_);
    const uint64_t turn = last_turn_++;
    auto my_turn = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      return turn == turn_ && cores <= free_;
    };
    mu_.Await(absl::Condition(&my_turn));
    ++turn_;
    free_ -= cores;
    return Lease(this, cores);
  }

  // Cores that nobody has and nobody waits for; none: some are in use, or wanted.
  std::optional<Lease> TakeIdle(int64_t cores) {
    absl::MutexLock lock(&mu_);
    if (free_ < cores_ || turn_ != last_turn_) return std::nullopt;
    cores = std::min(cores, cores_);
    free_ -= cores;
    return Lease(this, cores);
  }

  int64_t cores() const { return cores_; }
  int64_t waiting() const {  // for cores
    absl::MutexLock lock(&mu_);
    return static_cast<int64_t>(last_turn_ - turn_);
  }

 private:
  void GiveBack(int64_t cores) {
    absl::MutexLock lock(&mu_);
    free_ += cores;
  }

  const int64_t cores_;
  mutable absl::Mutex mu_;
  int64_t free_ ABSL_GUARDED_BY(mu_);
  uint64_t turn_ ABSL_GUARDED_BY(mu_) = 0;       // whose it is
  uint64_t last_turn_ ABSL_GUARDED_BY(mu_) = 0;  // the next to be given out
};

// An engine's part in it; without a budget its steps wait for nobody.
struct CoreShare {
  CoreBudget* budget = nullptr;
  int64_t threads = 1;
};

}  // namespace epikv
