#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "runtime/machine.h"
#include "runtime/rows.h"
#include "runtime/step_executor.h"

namespace epikv {

// Where a pool's rows lie, and how they are copied.
struct KvPlace {
  at::Device device = at::kCPU;
  // By gathers in ATen operations, as on a device; else on raw memory, of the CPU alone.
  bool by_gather = false;
};

// The rows of all lanes of all sequences: K as [rows, key_width], V as [rows, value_width]. Memory
// is taken once and, on the CPU, becomes resident as it is first written. Engine thread.
class KvPool {
 public:
  KvPool(int64_t num_rows, int64_t key_width, int64_t value_width, at::ScalarType dtype,
         KvPlace place = {});

  // Room for `rows` rows; may move other sequences. Precondition: rows <= free_rows().
  void Open(SequenceId id, int64_t rows);
  // The sequence keeps its first `rows` rows.
  void Shrink(SequenceId id, int64_t rows) { rows_.Shrink(id, rows); }
  void Close(SequenceId id) { rows_.Free(id); }

  // A sequence's first row in the pool. Valid until the next Open.
  int64_t first_row(SequenceId id) const { return rows_.begin(id); }
  // Copies rows of the pool, in this order. Ranges of one copy may overlap; none reads what one
  // before it has written.
  void Copy(absl::Span<const RowMove> copies);
  // Writes K and V rows [n, width] into rows of the pool: int64 [n], on its device.
  void Write(const at::Tensor& rows, const at::Tensor& keys, const at::Tensor& values);
  // All rows.
  const at::Tensor& keys() const { return key_rows_; }
  const at::Tensor& values() const { return value_rows_; }

  // A sequence's rows in the CPU's memory, by row number from its first. Valid until the next Open.
  char* key(SequenceId id, int64_t row) const {
    return keys_ + (rows_.begin(id) + row) * key_bytes_;
  }
  char* value(SequenceId id, int64_t row) const {
    return values_ + (rows_.begin(id) + row) * value_bytes_;
  }

  int64_t key_width() const { return key_rows_.size(1); }
  int64_t value_width() const { return value_rows_.size(1); }
  int64_t key_bytes() const { return key_bytes_; }
  int64_t value_bytes() const { return value_bytes_; }
  at::ScalarType dtype() const { return key_rows_.scalar_type(); }
  int64_t free_rows() const { return rows_.free_rows(); }
  int64_t num_rows() const { return rows_.num_rows(); }

  // What moving lanes has cost since the start.
  int64_t rows_moved() const { return rows_moved_; }
  absl::Duration longest_move() const { return longest_move_; }

 private:
  void Gather(absl::Span<const RowMove> copies);

  RowAllocator rows_;
  const KvPlace place_;
  at::Tensor key_rows_, value_rows_;
  char* const keys_;
  char* const values_;
  const int64_t key_bytes_, value_bytes_;  // of one row
  const ReservedMemory reserved_keys_, reserved_values_;
  int64_t rows_moved_ = 0;
  absl::Duration longest_move_;
};

}  // namespace epikv
