#include "runtime/kv_pool.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "absl/time/clock.h"

namespace epikv {

KvPool::KvPool(int64_t num_rows, int64_t key_width, int64_t value_width, at::ScalarType dtype)
    : rows_(num_rows),
      key_rows_(at::empty({num_rows, key_width}, dtype)),
      value_rows_(at::empty({num_rows, value_width}, dtype)),
      keys_(static_cast<char*>(key_rows_.data_ptr())),
      values_(static_cast<char*>(value_rows_.data_ptr())),
      key_bytes_(key_width * key_rows_.element_size()),
      value_bytes_(value_width * value_rows_.element_size()),
      reserved_keys_(keys_, num_rows * key_bytes_),
      reserved_values_(values_, num_rows * value_bytes_) {}

void KvPool::Open(SequenceId id, int64_t rows) {
  const absl::Time begin = absl::Now();
  const std::vector<RowMove> moves = rows_.Allocate(id, rows);
  for (const RowMove& m : moves) {
    std::memmove(keys_ + m.to * key_bytes_, keys_ + m.from * key_bytes_, m.count * key_bytes_);
    std::memmove(values_ + m.to * value_bytes_, values_ + m.from * value_bytes_,
                 m.count * value_bytes_);
    rows_moved_ += m.count;
  }
  if (!moves.empty()) longest_move_ = std::max(longest_move_, absl::Now() - begin);
}

}  // namespace epikv
