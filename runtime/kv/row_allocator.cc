#include "runtime/kv/row_allocator.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "runtime/base/require.h"

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

RowAllocator::Placement RowAllocator::Plan(SequenceId id, int64_t rows) {
  Require(rows > 0 && rows <= free_rows() && !begins_.contains(id),
          "rows were asked for that are not free, or twice");
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
  Placement placement;
  int64_t to = gaps[best_first].begin;
  for (size_t g = best_first; g < best_last; ++g) {
    const auto& [from, extent] = *gaps[g].next;
    if (from != to) placement.moves.push_back({.from = from, .to = to, .count = extent.size});
    to += extent.size;
  }
  Extents one = {{to, {.id = id, .size = rows}}};
  placement.extent = one.extract(one.begin());
  Begins begins = {{id, to}};
  placement.begin_of = begins.extract(begins.begin());
  begins_.reserve(begins_.size() + 1);
  return placement;
}

void RowAllocator::Place(Placement placement) noexcept {
  for (const RowMove& move : placement.moves) {
    Extents::node_type moved = extents_.extract(move.from);
    moved.key() = move.to;
    begins_.at(moved.mapped().id) = move.to;
    extents_.insert(std::move(moved));
  }
  const int64_t size = placement.extent.mapped().size;
  held_rows_ += size;
  touched_rows_ = std::max(touched_rows_, placement.extent.key() + size);
  extents_.insert(std::move(placement.extent));
  begins_.insert(std::move(placement.begin_of));
}

void RowAllocator::Shrink(SequenceId id, int64_t rows) {
  Extent& extent = extents_.at(begins_.at(id));
  Require(rows > 0 && rows <= extent.size, "an extent only shrinks");
  held_rows_ -= extent.size - rows;
  extent.size = rows;
}

void RowAllocator::Free(SequenceId id) noexcept {
  const auto extent = extents_.find(begins_.at(id));
  held_rows_ -= extent->second.size;
  extents_.erase(extent);
  begins_.erase(id);
}

}  // namespace epikv
