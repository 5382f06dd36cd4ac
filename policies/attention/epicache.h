#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

// How EpiCache (arXiv 2509.17396, section 3.3) shares a budget out among layers. Without torch.

namespace epikv {

// Budgets of the layers, in tokens of a head, whose mean is `budget`: in proportion to w = (1 - n)^
// power, n being the layer's similarity between the least (0) and the most (1), and a quarter of
// the budget at least. `similarities`: of a layer's keys under the full mask with those under a
// mask of blocks (`epikv calibrate epicache`). As published a layer that is cut off or raised
// leaves the sum another; here what lies above the floor is scaled so that all of the budget is
// spent.
std::vector<int64_t> EpicacheBudgets(absl::Span<const double> similarities, double power,
                                     int64_t budget);

// The same as published.
std::vector<int64_t> PublishedEpicacheBudgets(absl::Span<const double> similarities, double power,
                                              int64_t budget);

}  // namespace epikv
