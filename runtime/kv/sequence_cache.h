#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "policies/policy.h"
#include "runtime/kv/kv_layout.h"
#include "runtime/kv/kv_pool.h"
#include "runtime/request/packet.h"
#include "runtime/request/request.h"

namespace epikv {

// Which token lies in which slot, for the lanes that share one keep decision. Slots [0, used) are
// live, except for at most one hole: the slot of a token evicted one at a time, which the next
// token overwrites before anything reads it.
class SlotTable {
 public:
  explicit SlotTable(int64_t num_columns) : columns_(num_columns) {}

  // The slot that the next token will take, or one that comes so many behind it.
  int64_t NextSlot(int64_t ahead = 0) const {
    if (!hole_.has_value()) return used_ + ahead;
    return ahead == 0 ? *hole_ : used_ + ahead - 1;
  }
  // Slots that attention reads once `count` tokens more are written.
  int64_t UsedAfter(int64_t count) const { return used_ + count - (hole_.has_value() ? 1 : 0); }

  // Commits `count` tokens with indexes from `first` and positions from `position`, in the slots
  // that NextSlot gave. Their columns are zero. Requires: count is 1 where there is a hole.
  void Append(int64_t first, int64_t position, int64_t count);

  // The same of tokens that were cached elsewhere: the one at index[i] is at position[i].
  void Adopt(absl::Span<const int32_t> index, absl::Span<const int32_t> position);

  // The same of one token that comes back, with its columns.
  void Insert(int32_t index, int32_t position, absl::Span<const float> columns);

  int64_t num_columns() const { return std::ssize(columns_); }
  int64_t live() const { return used_ - (hole_.has_value() ? 1 : 0); }
  int64_t used() const { return used_; }
  std::optional<int64_t> hole() const { return hole_; }
  absl::Span<const int32_t> index() const { return absl::MakeConstSpan(index_).first(used_); }
  absl::Span<const int32_t> rope_position() const {
    return absl::MakeConstSpan(rope_position_).first(used_);
  }
  absl::Span<float> column(int64_t place) { return absl::MakeSpan(columns_[place]).first(used_); }
  absl::Span<const float> column(int64_t place) const {
    return absl::MakeConstSpan(columns_[place]).first(used_);
  }

  struct Copy {
    int64_t from = 0, to = 0;  // slots
  };
  // Drops the tokens in `slots` (ascending, live). One victim leaves a hole if `leave_hole`; more
  // are filled from the tail: the returned copies, which the caller repeats on the lanes.
  std::vector<Copy> Remove(absl::Span<const int64_t> slots, bool leave_hole);

  // The tokens of `from`, which has no hole, that do not lie in `left_out` (ascending slots), in
  // their order, without columns.
  static SlotTable Without(const SlotTable& from, absl::Span<const int64_t> left_out);

 private:
  int64_t used_ = 0;
  std::optional<int64_t> hole_;
  std::vector<int32_t> index_, rope_position_;  // by slot
  std::vector<std::vector<float>> columns_;     // [columns][slots]
};

// One lane's rows in the pool.
struct LaneRows {
  int64_t first_row = 0;  // of the pool
  char* keys = nullptr;   // on the CPU
  char* values = nullptr;
  int64_t capacity = 0;
};

// The KV cache of one sequence: its lanes, [layers x kv_heads], and what lies in their slots. The
// only file that knows the layout. Engine thread.
class SequenceCache {
 public:
  // The pool has room for the demand's peak (Ledger).
  SequenceCache(KvPool& pool, SequenceId id, const Request& request, const ModelShape& shape);
  // A copy of `from`, which is between two steps and has no scratch, in lanes of these capacities:
  // they have room for what is cached, and the pool for as many rows. Its peak is that of `from`.
  SequenceCache(SequenceId id, const Request& request, const SequenceCache& from,
                std::vector<int64_t> capacity);
  // A copy of what of `from` does not lie in `left_out`, for which `request` has
  // room. In both each lane has tokens of its own.
  using Slots = std::vector<std::vector<int64_t>>;  // of each table, ascending
  SequenceCache(SequenceId id, const Request& request, const SequenceCache& from,
                const Slots& left_out);
  SequenceCache(const SequenceCache&) = delete;
  SequenceCache& operator=(const SequenceCache&) = delete;

  const KvLayout& layout() const { return layout_; }
  const ModelShape& shape() const { return shape_; }
  // The request's, and where the answer's thinking is as far as that is known.
  const Protection& protection() const { return protection_; }
  void SetThought(TokenSpan thought) { protection_.thought = thought; }
  int64_t num_layers() const { return shape_.num_layers; }
  int64_t num_kv_heads() const { return shape_.num_kv_heads; }
  int64_t num_tables() const { return static_cast<int64_t>(tables_.size()); }
  int64_t TableOf(int64_t layer, int64_t head) const;
  SlotTable& table(int64_t t) { return tables_[t]; }
  const SlotTable& table(int64_t t) const { return tables_[t]; }
  LaneRows Lane(int64_t layer, int64_t head) const;
  int64_t capacity(int64_t layer, int64_t head) const {  // the same, without asking the pool
    return capacity_[layer * shape_.num_kv_heads + head];
  }

  // Of lanes, in rows: what they have room for, and what is in use.
  const std::vector<int64_t>& capacities() const { return capacity_; }
  std::vector<int64_t> UsedRows() const;

  // All heads of a layer have the same capacity and slots in use: they are one strided tensor.
  bool Uniform(int64_t layer) const;

  // Slots that the next tokens take in a table, and that attention reads once `count` of them are
  // written: behind those of a scratch pass, too. `ahead`: of one that comes so many behind it.
  int64_t NextSlot(int64_t table, int64_t ahead = 0) const {
    return tables_[table].NextSlot(ahead) + scratch_;
  }
  int64_t UsedAfter(int64_t table, int64_t count) const {
    return tables_[table].UsedAfter(scratch_ + count);
  }
  // Index of the next token.
  int64_t next() const { return newest_ + 1 + scratch_; }
  // RoPE position of the next token in a lane: its index, or the tokens retained before it.
  int64_t NextPosition(int64_t table) const;
  // RoPE positions at which the keys are attended over once `count` tokens more are written, by
  // slot. [UsedAfter(count)]
  std::vector<int64_t> PositionsAfter(int64_t table, int64_t count) const;

  // Rows behind those in use that a scratch pass has written. They are no tokens of the sequence,
  // and forgotten with 0.
  int64_t scratch() const { return scratch_; }
  void SetScratch(int64_t rows) { scratch_ = rows; }
  int64_t scratch_entries() const { return scratch_ * shape_.num_layers * shape_.num_kv_heads; }
  int64_t scratch_bytes() const { return scratch_entries() * layout_.row_bytes; }

  // Commits tokens written to every lane. Requires: no scratch.
  void Append(int64_t first, int64_t count);

  // Commits a token that comes back, written to the table's lanes in its NextSlot.
  void Insert(int64_t table, int32_t index, int32_t position, absl::Span<const float> columns);

  // Commits `count` tokens that were cached elsewhere, written to each table's lanes from its
  // NextSlot on: those of a packet's table, whose `index` counts from the first of them. Requires:
  // no scratch.
  void Adopt(int64_t count, const std::vector<Packet::Table>& tables);

  // Slots over the budget in a table, or in all tables that share one budget with it. >= 0.
  int64_t Excess(int64_t table) const;
  // Some table holds over `slack` slots more than its budget, or will with `coming` tokens more; of
  // a shared one, on average.
  bool OverBudget(int64_t slack, int64_t coming = 0) const;

  // Checks a policy's answer (INTERNAL: what is wrong with it). Where its victims lie.
  absl::StatusOr<Slots> SlotsOf(const std::vector<std::vector<int32_t>>& victims) const;
  // Drops the tokens in these slots. Returns the number of entries removed.
  int64_t Evict(const Slots& slots, bool leave_hole);

  // Lanes that share budgets get as much free room each.
  void ShareRoom();
  // Packs the lanes to their decode capacities and gives the surplus back to the pool.
  void ShrinkToDecode();
  bool SharesBudgets() const { return TablesPerPool() > 1; }

  int64_t newest() const { return newest_; }
  // Nothing was evicted: the token in a slot is the slot's number.
  bool Untouched() const;
  int64_t entries() const;
  int64_t peak_entries() const { return peak_entries_; }
  void ForgetPeak();
  int64_t bytes() const;
  int64_t peak_bytes() const { return peak_bytes_; }
  // What K and V that are held would take if rows were packed to the bits that the policy has
  // rounded them to (PolicyTraits::rounds_rows), rounded up. What would take more so is left as it
  // is. 0: no row is rounded.
  int64_t PackedBytes() const;
  std::vector<int32_t> KeptIndexes() const;

 private:
  // PositionsAfter under PositionMode::kCache: each token's rank among those retained.
  std::vector<int64_t> RanksAfter(int64_t table, int64_t count) const;
  int64_t LanesPerTable() const { return shape_.num_layers * shape_.num_kv_heads / num_tables(); }
  int64_t TablesPerPool() const;
  // Excess, negative where there is room.
  int64_t Surplus(int64_t table) const;
  // Gives each lane what it uses and an equal share of what is left of `rows`. Lanes that share
  // budgets hold unequally many, but grow alike.
  std::vector<int64_t> ShareOut(int64_t rows) const;
  // Moves the lanes, within the sequence's rows, to where these capacities put them.
  void LayOut(const std::vector<int64_t>& capacity);
  absl::StatusOr<std::vector<int64_t>> SlotsOf(int64_t table,
                                               const std::vector<int32_t>& victims) const;
  // Adds to `moves` what these copies are in the table's lanes.
  void AddMoves(int64_t table, absl::Span<const SlotTable::Copy> copies,
                std::vector<RowMove>& moves) const;
  void NotePeak();

  KvPool& pool_;
  const SequenceId id_;
  const Request& request_;
  Protection protection_;
  const ModelShape& shape_;
  const KvLayout layout_;
  std::vector<int64_t> capacity_, offset_;  // of lanes, in rows; offsets from the extent's first
  std::vector<SlotTable> tables_;
  const PoolRows rows_;
  int64_t newest_ = -1;
  int64_t scratch_ = 0;
  int64_t peak_entries_ = 0, peak_bytes_ = 0;
};

}  // namespace epikv
