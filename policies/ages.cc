#include "policies/ages.h"

#include <cmath>

namespace epikv {

Ages::Ages(absl::Span<const int64_t> ages) : count_(static_cast<int64_t>(ages.size())) {
  const auto log_of = [](int64_t age) { return std::log2(static_cast<double>(age)); };
  int64_t at = 0;
  for (int64_t age = 0; age < ages.back(); ++age) {
    while (at + 1 < count_ && ages[at + 1] <= age) ++at;
    const bool between = age > ages[at];
    const double beyond =
        between ? (log_of(age) - log_of(ages[at])) / (log_of(ages[at + 1]) - log_of(ages[at])) : 0;
    places_.push_back({.at = at, .beyond = static_cast<float>(beyond)});
  }
}

}  // namespace epikv
