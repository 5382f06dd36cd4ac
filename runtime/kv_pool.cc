#include "runtime/kv_pool.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "absl/time/clock.h"
#include "runtime/scalar_type.h"

namespace epikv {

KvPool::KvPool(int64_t num_rows, int64_t key_width, int64_t value_width, KvFormat format)
    : rows_(num_rows),
      format_(format),
      key_bytes_(format.RowBytes(key_width)),
      value_bytes_(format.RowBytes(value_width)),
      key_rows_(at::empty({num_rows, key_bytes_}, at::kByte)),
      value_rows_(at::empty({num_rows, value_bytes_}, at::kByte)),
      keys_(static_cast<char*>(key_rows_.data_ptr())),
      values_(static_cast<char*>(value_rows_.data_ptr())),
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

at::Tensor ReadRows(char* rows, int64_t count, int64_t width, const KvFormat& format) {
  if (format.stored == KvDType::kModel) {
    return at::from_blob(rows, {count, width}, ScalarTypeOf(format.model)).to(at::kFloat);
  }
  const KvFormat wide = {DType::kFloat32, format.stored};
  at::Tensor result = at::empty({count, width}, at::kFloat);
  float* const out = result.mutable_data_ptr<float>();
  for (int64_t i = 0; i < count; ++i) {
    ReadRow(rows + i * wide.RowBytes(width), out + i * width, width, wide);
  }
  return result;
}

}  // namespace epikv
