#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "absl/time/time.h"
#include "runtime/kv_format.h"
#include "runtime/machine.h"
#include "runtime/rows.h"
#include "runtime/step_executor.h"

namespace epikv {

// The rows of all lanes of all sequences, K and V, each as `format` has it. Memory is taken once
// and becomes resident as it is first written. Engine thread.
class KvPool {
 public:
  KvPool(int64_t num_rows, int64_t key_width, int64_t value_width, KvFormat format);

  // Room for `rows` rows; may move other sequences. Precondition: rows <= free_rows().
  void Open(SequenceId id, int64_t rows);
  // The sequence keeps its first `rows` rows.
  void Shrink(SequenceId id, int64_t rows) { rows_.Shrink(id, rows); }
  void Close(SequenceId id) { rows_.Free(id); }

  // A sequence's rows, by row number from its first. Valid until the next Open.
  char* key(SequenceId id, int64_t row) const {
    return keys_ + (rows_.begin(id) + row) * key_bytes_;
  }
  char* value(SequenceId id, int64_t row) const {
    return values_ + (rows_.begin(id) + row) * value_bytes_;
  }

  int64_t key_bytes() const { return key_bytes_; }
  int64_t value_bytes() const { return value_bytes_; }
  const KvFormat& format() const { return format_; }
  int64_t free_rows() const { return rows_.free_rows(); }
  int64_t num_rows() const { return rows_.num_rows(); }

  // What moving lanes has cost since the start.
  int64_t rows_moved() const { return rows_moved_; }
  absl::Duration longest_move() const { return longest_move_; }

 private:
  RowAllocator rows_;
  const KvFormat format_;
  const int64_t key_bytes_, value_bytes_;  // of one row
  at::Tensor key_rows_, value_rows_;       // [rows, bytes], uint8
  char* const keys_;
  char* const values_;
  const ReservedMemory reserved_keys_, reserved_values_;
  int64_t rows_moved_ = 0;
  absl::Duration longest_move_;
};

// Rows in fp32, [count, width]: those of fp32 where they lie, others copied.
at::Tensor ReadRows(char* rows, int64_t count, int64_t width, const KvFormat& format);

}  // namespace epikv
