#pragma once

#include <cstdint>

#include "runtime/kernels/kv_format.h"

// Bounds of the keys of a page, a few rows of a lane that lie together: of each channel the most
// and the least (Quest, arXiv 2406.10774, section 3.2). A query's product with any key of the page
// is at most sum_c max(q_c most_c, q_c least_c). Without torch.

namespace epikv {

// Of one page: [width] the most, then [width] the least, elements of the model's dtype. Those of
// int8 rows are rounded to it.
inline int64_t PageBoundsBytes(int64_t width, DType dtype) {
  return 2 * width * ElementBytes(dtype);
}

// Widens a page's bounds by rows of K. fresh: it had none.
void BoundRows(const void* rows, int64_t count, int64_t width, const KvFormat& format, bool fresh,
               void* bounds);

// Of each page the bound above, the largest over the group's queries. q: [group, width], bounds:
// [pages], both of dtype; scores: [pages]; scratch: PageScoreFloats.
void PageScores(const void* q, int64_t group, int64_t width, const void* bounds, int64_t pages,
                DType dtype, float* scores, float* scratch);
inline int64_t PageScoreFloats(int64_t group, int64_t width) { return 2 * (group + 1) * width; }

}  // namespace epikv
