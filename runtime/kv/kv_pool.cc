#include "runtime/kv/kv_pool.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "runtime/base/huge_pages.h"
#include "runtime/base/scalar_type.h"
#include "runtime/base/steady_time.h"

namespace epikv {

KvPool::KvPool(int64_t num_rows, int64_t key_width, int64_t value_width, KvFormat format,
               KvPlace place)
    : rows_(num_rows),
      format_(format),
      place_(place),
      key_bytes_(format.RowBytes(key_width)),
      value_bytes_(format.RowBytes(value_width)),
      key_rows_(at::empty({num_rows + (place.by_gather ? 1 : 0), key_bytes_},
                          at::dtype(at::kByte).device(place.device))),
      value_rows_(
          at::empty({key_rows_.size(0), value_bytes_}, at::dtype(at::kByte).device(place.device))),
      keys_(static_cast<char*>(key_rows_.data_ptr())),
      values_(static_cast<char*>(value_rows_.data_ptr())),
      reserved_keys_(keys_, place.device.is_cpu() ? num_rows * key_bytes_ : 0),
      reserved_values_(values_, place.device.is_cpu() ? num_rows * value_bytes_ : 0) {
  if (!place.device.is_cpu()) return;
  AdviseHugePages(keys_, num_rows * key_bytes_);
  AdviseHugePages(values_, num_rows * value_bytes_);
}

at::Tensor KvPool::Elements(const at::Tensor& rows) const {
  return rows.view(ScalarTypeOf(format_.model));
}

void KvPool::Open(SequenceId id, int64_t rows) {
  const absl::Time begin = SteadyNow();
  RowAllocator::Placement placement = rows_.Plan(id, rows);
  Copy(placement.moves);
  for (const RowMove& m : placement.moves) rows_moved_ += m.count;
  if (!placement.moves.empty()) longest_move_ = std::max(longest_move_, SteadyNow() - begin);
  rows_.Place(std::move(placement));
}

void KvPool::Copy(absl::Span<const RowMove> copies) {
  if (place_.by_gather) return Gather(copies);
  for (const RowMove& c : copies) {
    std::memmove(keys_ + c.to * key_bytes_, keys_ + c.from * key_bytes_, c.count * key_bytes_);
    std::memmove(values_ + c.to * value_bytes_, values_ + c.from * value_bytes_,
                 c.count * value_bytes_);
  }
}

void KvPool::Write(const at::Tensor& rows, const at::Tensor& keys, const at::Tensor& values) {
  this->keys().index_copy_(0, rows, keys);
  this->values().index_copy_(0, rows, values);
}

void KvPool::Replace(absl::Span<const int64_t> rows, const at::Tensor& keys,
                     const at::Tensor& values) {
  const at::ScalarType dtype = ScalarTypeOf(format_.model);
  const at::Tensor k = keys.to(dtype).contiguous(), v = values.to(dtype).contiguous();
  if (format_.stored == KvDType::kModel) {
    const at::Tensor index = at::tensor(at::ArrayRef<int64_t>(rows.data(), rows.size()), at::kLong);
    Write(index.to(place_.device), k.to(place_.device), v.to(place_.device));
    return;
  }
  const auto* from_k = static_cast<const char*>(k.const_data_ptr());
  const auto* from_v = static_cast<const char*>(v.const_data_ptr());
  for (const int64_t row : rows) {
    WriteRow(from_k, key(row), k.size(1), format_);
    WriteRow(from_v, value(row), v.size(1), format_);
    from_k += k.size(1) * k.element_size();
    from_v += v.size(1) * v.element_size();
  }
}

at::Tensor KvPool::Read(const at::Tensor& all, absl::Span<const int64_t> rows) const {
  const at::Tensor index = at::tensor(at::ArrayRef<int64_t>(rows.data(), rows.size()), at::kLong);
  const at::Tensor some = all.index_select(0, index.to(place_.device)).cpu();  // [n, bytes]
  if (format_.stored == KvDType::kModel) return Elements(some).to(at::kFloat);
  const int64_t width = some.size(1) - format_.RowBytes(0);
  return ReadRows(static_cast<char*>(some.data_ptr()), some.size(0), width, format_);
}

std::vector<KvPool::Piece> KvPool::PiecesOf(absl::Span<const RowMove> copies) {
  constexpr int64_t kMostRows = 1 << 16;  // gathered at once: bounds the scratch
  std::vector<Piece> pieces;
  for (const RowMove& c : copies) {
    // From the end that is overwritten last.
    for (int64_t done = 0; done < c.count;) {
      if (pieces.empty() || std::ssize(pieces.back().from) == kMostRows) pieces.emplace_back();
      Piece& piece = pieces.back();
      const int64_t rows = std::min(c.count - done, kMostRows - std::ssize(piece.from));
      const int64_t begin = c.to < c.from ? done : c.count - done - rows;
      for (int64_t i = begin; i < begin + rows; ++i) {
        piece.from.push_back(c.from + i);
        piece.to.push_back(c.to + i);
      }
      done += rows;
    }
  }
  return pieces;
}

at::Tensor KvPool::IndexOf(const Piece& piece) const {
  std::vector<int64_t> rows = piece.from;
  rows.insert(rows.end(), piece.to.begin(), piece.to.end());
  return at::tensor(rows, at::kLong).to(place_.device).view({2, -1});
}

void KvPool::Gather(absl::Span<const RowMove> copies) {
  const std::vector<Piece> pieces = PiecesOf(copies);
  at::Tensor* const both[] = {&key_rows_, &value_rows_};
  size_t done = 0;  // twice the pieces: K, then V
  try {
    for (const Piece& piece : pieces) {
      const at::Tensor index = IndexOf(piece);
      for (at::Tensor* all : both) {
        all->index_copy_(0, index[1], all->index_select(0, index[0]));
        ++done;
      }
    }
  } catch (...) {
    // Others' rows are among them. Last first: what a piece has read, a later one may overwrite.
    try {
      while (done-- > 0) {
        const at::Tensor index = IndexOf(pieces[done / 2]);
        at::Tensor* const all = both[done % 2];
        all->index_copy_(0, index[0], all->index_select(0, index[1]));
      }
    } catch (...) {
      lost_ = true;
    }
    throw;
  }
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
