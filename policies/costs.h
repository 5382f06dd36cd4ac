#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"

namespace epikv {

// What a policy costs with its default parameters, at the number of cached tokens where that is the
// largest share of a decode step under `full`.
struct PolicyCost {
  absl::string_view policy;
  int64_t cached_tokens = 0;
  double cpu_us_per_token = 0;
  double share_of_step = 0;
};

// Null: not measured.
const PolicyCost* FindCost(absl::string_view policy);

// "cheap", "moderate" or "heavy".
absl::string_view CostLevel(double share_of_step);

// Machine and build of the measurement.
absl::string_view CostsMadeWith();

}  // namespace epikv
