#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "runtime/step_executor.h"

namespace epikv {

struct RowMove {
  int64_t from = 0, to = 0, count = 0;  // to < from; the ranges may overlap
};

// Which rows of the pool belong to whom: each sequence holds one extent. Extents may be moved
// between steps, so the pool never fragments: whatever fits in the free rows can be placed.
class RowAllocator {
 public:
  explicit RowAllocator(int64_t num_rows) : num_rows_(num_rows) {}

  // Places `rows` rows, in the tightest gap that holds them; else joins the gaps that cost the
  // fewest moved rows. The caller carries out the returned moves, in order.
  // Precondition: rows <= free_rows(), the id holds nothing.
  std::vector<RowMove> Allocate(SequenceId id, int64_t rows);

  // Gives back the extent's tail.
  void Shrink(SequenceId id, int64_t rows);
  void Free(SequenceId id);

  int64_t begin(SequenceId id) const { return begins_.at(id); }
  int64_t num_rows() const { return num_rows_; }
  int64_t free_rows() const { return num_rows_ - held_rows_; }

 private:
  struct Extent {
    SequenceId id{};
    int64_t size = 0;
  };
  struct Gap {
    int64_t begin = 0, size = 0;
    std::map<int64_t, Extent>::iterator next;  // the extent behind it
  };
  std::vector<Gap> Gaps();
  void Place(SequenceId id, int64_t begin, int64_t rows);

  const int64_t num_rows_;
  int64_t held_rows_ = 0;
  std::map<int64_t, Extent> extents_;  // by first row
  absl::flat_hash_map<SequenceId, int64_t> begins_;
};

}  // namespace epikv
