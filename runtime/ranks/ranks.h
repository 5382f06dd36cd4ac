#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "absl/strings/string_view.h"
#include "runtime/base/dtype.h"

// Processes that serve one model together (tensor parallel): each has a shard of its weights and of
// the KV cache.

namespace epikv {

inline constexpr int kMostRanks = 8;

// A rank has failed, and the others cannot go on without it.
struct RankFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct RankMemory;  // that all of them share

// One of several ranks. Its calls that exchange are made by all ranks in the same order, by one
// thread of each; they wait for one another, and throw RankFailure where one has failed. Waiting
// spins for a moment, and sleeps then.
class Ranks {
 public:
  // Memory for `size` ranks, 1 to kMostRanks, shared with what this process forks from now on. A
  // rank exchanges so many bytes at once, and more in pieces. Throws where there is no memory.
  static std::shared_ptr<RankMemory> Share(int size, int64_t slot_bytes = int64_t{1} << 20);

  Ranks(std::shared_ptr<RankMemory> memory, int rank);

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Sums `count` elements over all ranks, in place: in fp32, in the order of the ranks, so that all
  // have the same bits.
  void Sum(void* data, int64_t count, DType dtype);
  // The same of fp32, divided by the number of ranks.
  void Average(float* data, int64_t count);
  // Puts every rank's part of `bytes` behind that of the rank before. all: [size x bytes]
  void Gather(const void* part, int64_t bytes, void* all);
  int64_t Least(int64_t value);
  // Fails where the ranks' values are not the same: they have come apart.
  void Agree(uint64_t value, const char* what);

  // From rank 0 to all others.
  void Send(absl::string_view message);
  std::string Receive();

  // This rank cannot go on: what all ranks throw from now on. The first reason holds. Any thread.
  void Fail(absl::string_view why);
  // Why a rank has failed; empty: none has. Any thread.
  std::string failure() const;

 private:
  enum class Exchange { kCall, kMessage, kSum, kSharedSum, kGather };

  // Where a rank puts what it gives in the exchange under way.
  char* Slot(int rank) const;
  // Until all ranks are here, for the same exchange of so much; fails where one is here for
  // another: they have come apart.
  void Meet(Exchange exchange, int64_t count);
  template <class T>
  void SumOf(T* data, int64_t count);

  const std::shared_ptr<RankMemory> memory_;
  const int rank_, size_;
  const bool spins_;     // there is a core for each: who spins keeps none from its work
  int brief_ = 0;        // so many waits are still to spin briefly
  uint32_t met_ = 0;     // how often
  bool second_ = false;  // which half of the slots: those of the last exchange may still be read
};

}  // namespace epikv
