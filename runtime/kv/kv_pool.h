#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "runtime/base/machine.h"
#include "runtime/kernels/kv_format.h"
#include "runtime/kv/row_allocator.h"
#include "runtime/request/sequence_id.h"

namespace epikv {

// Where a pool's rows lie, and how they are copied.
struct KvPlace {
  at::Device device = at::kCPU;
  // By gathers in ATen operations, as on a device; else on raw memory, of the CPU alone.
  bool by_gather = false;
};

// The rows of all lanes of all sequences, K and V, each as `format` has it. Memory is taken once
// and, on the CPU, becomes resident as it is first written. Engine thread.
class KvPool {
 public:
  KvPool(int64_t num_rows, int64_t key_width, int64_t value_width, KvFormat format,
         KvPlace place = {});

  // Room for `rows` rows; may move other sequences. If it throws, nothing has changed (but see
  // lost()). Requires: rows <= free_rows(). See PoolRows.
  void Open(SequenceId id, int64_t rows);
  // The sequence keeps its first `rows` rows.
  void Shrink(SequenceId id, int64_t rows) { rows_.Shrink(id, rows); }
  void Close(SequenceId id) noexcept { rows_.Free(id); }

  // A sequence's first row in the pool. Valid until the next Open.
  int64_t first_row(SequenceId id) const { return rows_.begin(id); }
  // Copies rows of the pool, in this order. Ranges of one copy may overlap; none reads what one
  // before it has written. If it throws, what was read is again where it was (but see lost()).
  void Copy(absl::Span<const RowMove> copies);
  // A copy failed, and putting back what it had moved failed too: any sequence's rows may be wrong.
  bool lost() const { return lost_; }
  // Nobody holds rows any more.
  void StartAnew() { lost_ = false; }
  // Writes K and V rows [n, width] into rows of the pool: int64 [n], on its device.
  void Write(const at::Tensor& rows, const at::Tensor& keys, const at::Tensor& values);
  // The same of rows in fp32 and the CPU's memory, written in the pool's format.
  void Replace(absl::Span<const int64_t> rows, const at::Tensor& keys, const at::Tensor& values);
  // Copies of some rows, in fp32 and the CPU's memory, whatever the pool's format: [n, width].
  at::Tensor ReadKeys(absl::Span<const int64_t> rows) const { return Read(key_rows_, rows); }
  at::Tensor ReadValues(absl::Span<const int64_t> rows) const { return Read(value_rows_, rows); }
  // All rows of a pool in the model's dtype, the spare one, too: [rows, width].
  at::Tensor keys() const { return Elements(key_rows_); }
  at::Tensor values() const { return Elements(value_rows_); }
  at::Device device() const { return place_.device; }

  // A row in the CPU's memory. Valid until the next Open.
  char* key(int64_t row) const { return keys_ + row * key_bytes_; }
  char* value(int64_t row) const { return values_ + row * value_bytes_; }

  int64_t key_bytes() const { return key_bytes_; }
  int64_t value_bytes() const { return value_bytes_; }
  const KvFormat& format() const { return format_; }
  int64_t free_rows() const { return rows_.free_rows(); }
  int64_t num_rows() const { return rows_.num_rows(); }
  // A row behind them that nobody reads, of a pool of gathers: for what is nobody's.
  int64_t spare_row() const { return rows_.num_rows(); }
  // Up to the last row that was ever held, written or not: no more of the pool is resident, but for
  // the rest of a huge page. 0 on a device.
  int64_t touched_bytes() const {
    return place_.device.is_cpu() ? rows_.touched_rows() * (key_bytes_ + value_bytes_) : 0;
  }

  // What moving lanes has cost since the start.
  int64_t rows_moved() const { return rows_moved_; }
  absl::Duration longest_move() const { return longest_move_; }

 private:
  // Rows that are read at once, and where they go.
  struct Piece {
    std::vector<int64_t> from, to;
  };
  static std::vector<Piece> PiecesOf(absl::Span<const RowMove> copies);
  // int64 [2, rows], on the pool's device.
  at::Tensor IndexOf(const Piece& piece) const;
  void Gather(absl::Span<const RowMove> copies);
  at::Tensor Elements(const at::Tensor& rows) const;
  at::Tensor Read(const at::Tensor& all, absl::Span<const int64_t> rows) const;

  RowAllocator rows_;
  const KvFormat format_;
  const KvPlace place_;
  const int64_t key_bytes_, value_bytes_;  // of one row
  at::Tensor key_rows_, value_rows_;       // [rows, bytes], uint8
  char* const keys_;
  char* const values_;
  const ReservedMemory reserved_keys_, reserved_values_;
  int64_t rows_moved_ = 0;
  absl::Duration longest_move_;
  bool lost_ = false;
};

// Rows of a pool that somebody holds, from construction to destruction.
class PoolRows {
 public:
  PoolRows(KvPool& pool, SequenceId id, int64_t rows) : pool_(&pool), id_(id) {
    pool.Open(id, rows);
  }
  ~PoolRows() {
    if (pool_ != nullptr) pool_->Close(id_);
  }
  PoolRows(PoolRows&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)), id_(other.id_) {}
  PoolRows& operator=(PoolRows&&) = delete;

  int64_t first_row() const { return pool_->first_row(id_); }

 private:
  KvPool* pool_;
  const SequenceId id_;
};

// Rows in fp32, [count, width]: those of fp32 where they lie, others copied.
at::Tensor ReadRows(char* rows, int64_t count, int64_t width, const KvFormat& format);

}  // namespace epikv
