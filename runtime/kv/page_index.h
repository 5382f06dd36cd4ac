#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "runtime/kernels/kernels.h"
#include "runtime/kernels/kv_format.h"

namespace epikv {

// Which pages of a sequence's lanes a query reads: bounds of the keys of each (page_bounds.h), kept
// beside the lanes and made again where slots have changed. Without torch. Of different lanes it
// may be called at the same time.
class PageIndex {
 public:
  // page: tokens. width: of keys.
  PageIndex(int64_t num_lanes, int64_t page, int64_t width, const KvFormat& format)
      : page_(page), width_(width), format_(format), lanes_(num_lanes) {}

  // Tells what lies in a lane: `keys` are rows [used], of which row `written` is new.
  void Update(int64_t lane, const char* keys, int64_t written, int64_t used);
  // Tokens have moved, gone, or been rounded, in any lane.
  void Forget();

  // The pages that score highest for the group's queries [group, width], of all the one with slot
  // `newest`: as many as hold `tokens`. Ascending, neighbours joined; empty: all of the lane is
  // read. Requires: Update.
  void Choose(int64_t lane, const void* q, int64_t group, int64_t newest, int64_t tokens,
              std::vector<SlotRange>& reads) const;

  // Whether the bounds that a lane has are bounds of its rows, but of the hole's: a law, for tests.
  bool Holds(int64_t lane, const char* keys, std::optional<int64_t> hole) const;

  // Bytes for each token of a lane, rounded up, and for a lane beside these.
  static int64_t BytesPerToken(int64_t page, int64_t width, DType dtype);
  static int64_t BytesPerLane(int64_t width, DType dtype);

 private:
  struct Lane {
    int64_t used = 0;          // slots that are in the bounds
    std::vector<char> bounds;  // [pages]
  };
  char* BoundsOf(Lane& lane, int64_t page) const;

  const int64_t page_, width_;
  const KvFormat format_;
  std::vector<Lane> lanes_;
};

// The pages of `scores` that are read of a lane of `used` slots: `most` of them, of which one is
// `newest`, ties to the older. As ranges of slots, ascending, neighbours joined.
std::vector<SlotRange> ChoosePages(absl::Span<const float> scores, int64_t most, int64_t newest,
                                   int64_t page, int64_t used);

}  // namespace epikv
