#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "runtime/kernels/tier_format.h"
#include "runtime/kv/kv_layout.h"
#include "runtime/kv/sequence_cache.h"
#include "runtime/kv/tier_store.h"

namespace epikv {

// Rows of one lane, copied out of a tier. Kept by whoever reads, from call to call.
struct FarRows {
  std::vector<char> keys, values;  // [count] rows of the pool's format
  int64_t count = 0;
};

// A token that comes back to the lanes of its table.
struct Recalled {
  int32_t index = 0, rope_position = 0;
  std::vector<float> columns;
  std::vector<char> keys, values;  // [lanes of the table] rows
};

// Below a sequence's lanes: tokens that were evicted. Attention can read of them, and they can come
// back. Which they are is told by slot table, as in the cache. Their rows, of all lanes of the
// table, lie in a store in a format of its own: as the pool has them, so that what comes back has
// the very bits that went, or rounded to fewer. Of a table so many tokens fit; then the one that
// went first is forgotten. A store that fails holds nothing from then on, and tokens are evicted as
// if there were no tier. On the CPU. Engine thread; Fetch may be called by several at a time.
class SequenceTier {
 public:
  // layout: of the cache. fetches: whether Fetch is called.
  SequenceTier(const KvLayout& layout, const ModelShape& shape, const TierFormat& format,
               int64_t tokens_per_table, bool fetches, TierOpener open);
  // A copy, for a completion that goes on from the same cache.
  std::unique_ptr<SequenceTier> Clone() const;
  SequenceTier(const SequenceTier&) = delete;
  SequenceTier& operator=(const SequenceTier&) = delete;

  // Takes the tokens in these slots of a table, which are about to be evicted, in the order of
  // their indexes.
  void Demote(const SequenceCache& cache, int64_t table, absl::Span<const int64_t> slots);
  // Takes tokens out, which it holds. Fewer if the store fails.
  std::vector<Recalled> Take(int64_t table, absl::Span<const int32_t> tokens);
  // Drops what it holds of these tokens, in every table.
  void Forget(TokenSpan tokens);
  // Puts one back, as the newest slot of its table, which has room.
  void PutBack(const Recalled& token, SequenceCache& cache, int64_t table) const;

  // Copies of a lane those tokens out whose keys may meet the group's queries [group, width] best:
  // `most` at most, by pages of kTierPage that went one after another and the bounds of their keys
  // (page_bounds.h). Requires: it was made for it, and most >= kTierPage, or it holds no more.
  void Fetch(int64_t lane, const void* q, int64_t group, int64_t most, FarRows& rows) const;

  // Indexes of the tokens that a table has here, in the order in which they went.
  std::vector<int32_t> tokens(int64_t table) const;
  bool Holds(int64_t table, int32_t token) const {
    return !failed_ && tables_[table].at.contains(token);
  }
  // Keys of these tokens of a lane: rows of the pool's format, zeros of what it does not hold.
  std::vector<char> Keys(int64_t lane, absl::Span<const int32_t> tokens) const;

  bool empty() const { return held_ == 0 || failed_; }
  bool failed() const { return failed_; }
  TierUsage usage() const;                                      // since it was opened
  int64_t entries() const { return held_ * lanes_per_table_; }  // that it holds

 private:
  struct Token {
    int32_t index = -1, rope_position = 0;  // -1: none
    int64_t order = 0;                      // of its demotion
    std::vector<float> columns;
  };
  struct Table {
    std::vector<Token> places;                // [filled]
    std::unordered_map<int32_t, int64_t> at;  // places by index of the token
    std::vector<int64_t> free;                // places of tokens that came back
    // Place and order of all that went; an entry whose order is not its place's is void.
    std::deque<std::pair<int64_t, int64_t>> queue;
  };

  // Lanes of a table, which stand one after another.
  int64_t FirstLane(int64_t table) const { return table * lanes_per_table_; }
  int64_t PlaceFor(Table& table);
  // The token of this place is here no more.
  void Free(Table& table, int64_t place);
  void DropVoidEntries(Table& table) const;
  void BoundPages(int64_t table, std::vector<int64_t> places);
  static bool IsHeld(const Table& table, const std::pair<int64_t, int64_t>& entry);
  char* BoundsOf(int64_t lane, int64_t page);
  // Rows of a lane from a place on, in the pool's format. False: the store has failed.
  enum class Rows { kKeys, kValues };
  bool Write(Rows kind, int64_t lane, int64_t place, const char* rows);  // one
  bool Read(Rows kind, int64_t lane, int64_t place, int64_t count, char* rows) const;
  int64_t OffsetOf(Rows kind, int64_t lane, int64_t place) const;
  int64_t WidthOf(Rows kind) const {
    return kind == Rows::kKeys ? shape_.key_width : shape_.value_width;
  }
  bool Check(const absl::Status& status) const;  // false, and failed from then on, if not OK
  bool Usable();  // false if it has failed; then it holds nothing any more

  const KvLayout layout_;
  const ModelShape shape_;
  const TierFormat format_;
  const int64_t tokens_;
  const bool fetches_;
  const int64_t key_bytes_, value_bytes_;  // of one row of the pool
  const int64_t lanes_per_table_, bytes_;
  const TierOpener open_;
  std::unique_ptr<TierStore> store_;  // null: it could not be opened
  std::vector<Table> tables_;
  std::vector<std::vector<char>> bounds_;  // of each lane: [pages]
  int64_t next_order_ = 0, held_ = 0;
  TierUsage usage_;
  mutable std::atomic<int64_t> fetched_ = 0;
  mutable std::atomic<bool> failed_ = false;
};

}  // namespace epikv
