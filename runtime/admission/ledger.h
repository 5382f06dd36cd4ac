#pragma once

#include <cstdint>
#include <unordered_map>

#include "runtime/request/sequence_id.h"

namespace epikv {

// Bytes of the KV pool that are promised to running requests. A running request is never preempted
// for KV: its peak is reserved before it starts. Owned by the engine.
class Ledger {
 public:
  explicit Ledger(int64_t capacity_bytes) : capacity_(capacity_bytes) {}

  // The admission law: true exactly if reserved + bytes <= capacity.
  bool Fits(int64_t bytes) const { return bytes <= capacity_ - reserved_; }
  void Reserve(SequenceId id, int64_t bytes);  // Precondition: it fits; the id holds nothing.
  void Shrink(SequenceId id, int64_t bytes);   // to `bytes`, at most what it holds
  void Release(SequenceId id);

  int64_t capacity() const { return capacity_; }
  int64_t reserved() const { return reserved_; }
  int64_t held(SequenceId id) const {
    const auto found = held_.find(id);
    return found == held_.end() ? 0 : found->second;
  }

 private:
  const int64_t capacity_;
  int64_t reserved_ = 0;
  std::unordered_map<SequenceId, int64_t> held_;
};

}  // namespace epikv
