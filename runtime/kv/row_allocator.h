#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "runtime/request/sequence_id.h"

namespace epikv {

struct RowMove {
  int64_t from = 0, to = 0, count = 0;  // the ranges may overlap
};

// Which rows of the pool belong to whom: each sequence holds one extent. Extents may be moved
// between steps, so the pool never fragments: whatever fits in the free rows can be placed.
class RowAllocator {
  struct Extent {
    SequenceId id{};
    int64_t size = 0;
  };
  using Extents = std::map<int64_t, Extent>;  // by first row
  // Of each holder, the first row. (absl's maps break when memory runs out.)
  using Begins = std::unordered_map<SequenceId, int64_t>;

 public:
  explicit RowAllocator(int64_t num_rows) : num_rows_(num_rows) {}

  // Where an extent will lie, and what has to move for it, in order. Holds all memory that Place
  // needs.
  struct Placement {
    std::vector<RowMove> moves;  // to < from
    Extents::node_type extent;
    Begins::node_type begin_of;
  };

  // Places `rows` rows: in the tightest gap that holds them; else it joins the gaps that cost the
  // fewest moved rows. Nothing has changed yet, whether or not it throws.
  // Requires: rows <= free_rows(), the id holds nothing.
  Placement Plan(SequenceId id, int64_t rows);
  // The moves have been carried out, and nothing else has been planned meanwhile: from now on
  // extents lie there.
  void Place(Placement placement) noexcept;

  // Gives back the extent's tail. Requires: it has so many rows.
  void Shrink(SequenceId id, int64_t rows);
  void Free(SequenceId id) noexcept;

  int64_t begin(SequenceId id) const { return begins_.at(id); }
  int64_t num_rows() const { return num_rows_; }
  int64_t free_rows() const { return num_rows_ - held_rows_; }
  // Up to the last one that was ever held.
  int64_t touched_rows() const { return touched_rows_; }

 private:
  struct Gap {
    int64_t begin = 0, size = 0;
    Extents::iterator next;  // the extent behind it
  };
  std::vector<Gap> Gaps();

  const int64_t num_rows_;
  int64_t held_rows_ = 0, touched_rows_ = 0;
  Extents extents_;
  Begins begins_;
};

}  // namespace epikv
