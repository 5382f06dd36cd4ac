#include "runtime/kv/page_index.h"

#include <algorithm>
#include <numeric>

#include "runtime/kernels/page_bounds.h"

namespace epikv {

int64_t PageIndex::BytesPerToken(int64_t page, int64_t width, DType dtype) {
  return (PageBoundsBytes(width, dtype) + page - 1) / page;
}

int64_t PageIndex::BytesPerLane(int64_t width, DType dtype) {
  return PageBoundsBytes(width, dtype);  // of a page that is not full
}

char* PageIndex::BoundsOf(Lane& lane, int64_t page) const {
  return lane.bounds.data() + page * PageBoundsBytes(width_, format_.model);
}

void PageIndex::Update(int64_t lane, const char* keys, int64_t written, int64_t used) {
  Lane& own = lanes_[lane];
  const int64_t row_bytes = format_.RowBytes(width_), pages = (used + page_ - 1) / page_;
  own.bounds.resize(pages * PageBoundsBytes(width_, format_.model));
  auto bound = [&](int64_t begin, int64_t end) {  // of one page
    BoundRows(keys + begin * row_bytes, end - begin, width_, format_, begin % page_ == 0,
              BoundsOf(own, begin / page_));
  };
  if (written < own.used) {  // a slot that had another token: its page anew
    const int64_t begin = written / page_ * page_;
    bound(begin, std::min(begin + page_, own.used));
  }
  for (int64_t begin = own.used; begin < used;) {
    const int64_t end = std::min(used, (begin / page_ + 1) * page_);
    bound(begin, end);
    begin = end;
  }
  own.used = used;
}

bool PageIndex::Holds(int64_t lane, const char* keys, std::optional<int64_t> hole) const {
  const Lane& own = lanes_[lane];
  const int64_t row_bytes = format_.RowBytes(width_);
  for (int64_t slot = 0; slot < own.used; ++slot) {
    if (slot == hole) continue;
    const int64_t bytes = PageBoundsBytes(width_, format_.model);
    const char* const bounds = own.bounds.data() + slot / page_ * bytes;
    std::vector<char> widened(bounds, bounds + bytes);
    BoundRows(keys + slot * row_bytes, 1, width_, format_, /*fresh=*/false, widened.data());
    if (!std::equal(widened.begin(), widened.end(), bounds)) return false;
  }
  return true;
}

void PageIndex::Forget() {
  for (Lane& lane : lanes_) lane.used = 0;
}

void PageIndex::Choose(int64_t lane, const void* q, int64_t group, int64_t newest, int64_t tokens,
                       std::vector<SlotRange>& reads) const {
  reads.clear();
  const Lane& own = lanes_[lane];
  const int64_t pages = (own.used + page_ - 1) / page_, most = tokens / page_;
  if (pages <= most) return;
  thread_local std::vector<float> scores, scratch;
  scores.resize(pages);
  scratch.resize(PageScoreFloats(group, width_));
  PageScores(q, group, width_, own.bounds.data(), pages, format_.model, scores.data(),
             scratch.data());
  reads = ChoosePages(scores, most, newest / page_, page_, own.used);
}

std::vector<SlotRange> ChoosePages(absl::Span<const float> scores, int64_t most, int64_t newest,
                                   int64_t page, int64_t used) {
  std::vector<int64_t> order(scores.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  const auto better = [&](int64_t a, int64_t b) {
    if ((a == newest) != (b == newest)) return a == newest;
    if (scores[a] != scores[b]) return scores[a] > scores[b];
    return a < b;
  };
  const int64_t count = std::min<int64_t>(std::max<int64_t>(most, 1), std::ssize(order));
  std::nth_element(order.begin(), order.begin() + (count - 1), order.end(), better);
  std::sort(order.begin(), order.begin() + count);
  std::vector<SlotRange> reads;
  for (int64_t i = 0; i < count; ++i) {
    const SlotRange range = {order[i] * page, std::min(used, (order[i] + 1) * page)};
    if (!reads.empty() && reads.back().end == range.begin) {
      reads.back().end = range.end;
    } else {
      reads.push_back(range);
    }
  }
  return reads;
}

}  // namespace epikv
