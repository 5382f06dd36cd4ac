#include "runtime/admission/ledger.h"

#include "runtime/base/require.h"

namespace epikv {

void Ledger::Reserve(SequenceId id, int64_t bytes) {
  Require(Fits(bytes) && !held_.contains(id), "reserved what does not fit, or twice");
  held_.emplace(id, bytes);
  reserved_ += bytes;
}

void Ledger::Shrink(SequenceId id, int64_t bytes) {
  const auto held = held_.find(id);
  Require(held != held_.end() && bytes <= held->second, "a reservation only shrinks");
  reserved_ -= held->second - bytes;
  held->second = bytes;
}

void Ledger::Release(SequenceId id) {
  const auto held = held_.find(id);
  Require(held != held_.end(), "released what was not reserved");
  reserved_ -= held->second;
  held_.erase(held);
}

}  // namespace epikv
