#include "runtime/rows.h"

#include <limits>

#include "absl/base/internal/raw_logging.h"

namespace epikv {

// Every gap, empty ones too, in order: one before each extent and one behind the last.
std::vector<RowAllocator::Gap> RowAllocator::Gaps() {
  std::vector<Gap> gaps;
  int64_t end = 0;
  for (auto it = extents_.begin(); it != extents_.end(); ++it) {
    gaps.push_back({.begin = end, .size = it->first - end, .next = it});
    end = it->first + it->second.size;
  }
  gaps.push_back({.begin = end, .size = num_rows_ - end, .next = extents_.end()});
  return gaps;
}

void RowAllocator::Place(SequenceId id, int64_t begin, int64_t rows) {
  extents_[begin] = {.id = id, .size = rows};
  begins_[id] = begin;
}

std::vector<RowMove> RowAllocator::Allocate(SequenceId id, int64_t rows) {
  ABSL_RAW_CHECK(rows > 0 && rows <= free_rows() && !begins_.contains(id),
                 "allocated what does not fit, or twice");
  std::vector<Gap> gaps = Gaps();
  // The run of gaps [first, last] that together hold the rows at the least cost: rows between them
  // that have to move, then rows left over.
  size_t best_first = 0, best_last = 0, first = 0;
  std::pair<int64_t, int64_t> best = {std::numeric_limits<int64_t>::max(), 0};
  int64_t hollow = 0, between = 0;
  for (size_t last = 0; last < gaps.size(); ++last) {
    if (last > first) between += gaps[last - 1].next->second.size;
    hollow += gaps[last].size;
    while (hollow - gaps[first].size >= rows && first < last) {
      hollow -= gaps[first].size;
      between -= gaps[first].next->second.size;
      ++first;
    }
    if (hollow >= rows && std::pair(between, hollow) < best) {
      best = {between, hollow};
      best_first = first;
      best_last = last;
    }
  }
  std::vector<RowMove> moves;
  int64_t to = gaps[best_first].begin;
  for (size_t g = best_first; g < best_last; ++g) {
    const auto [from, extent] = *gaps[g].next;
    if (from != to) {
      moves.push_back({.from = from, .to = to, .count = extent.size});
      extents_.erase(gaps[g].next);
      Place(extent.id, to, extent.size);
    }
    to += extent.size;
  }
  Place(id, to, rows);
  held_rows_ += rows;
  return moves;
}

void RowAllocator::Shrink(SequenceId id, int64_t rows) {
  Extent& extent = extents_.at(begins_.at(id));
  ABSL_RAW_CHECK(rows > 0 && rows <= extent.size, "an extent only shrinks");
  held_rows_ -= extent.size - rows;
  extent.size = rows;
}

void RowAllocator::Free(SequenceId id) {
  const auto extent = extents_.find(begins_.at(id));
  held_rows_ -= extent->second.size;
  extents_.erase(extent);
  begins_.erase(id);
}

}  // namespace epikv
