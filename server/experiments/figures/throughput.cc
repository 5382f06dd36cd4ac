#include "server/experiments/figures/throughput.h"

#include <algorithm>

namespace epikv {

Throughput::Throughput(const Windows& windows, absl::Time start, absl::Time over, absl::Time now)
    : windows_(windows),
      first_(windows.At(start) + 1),
      last_end_(std::min(over, now - windows.length())) {}

void Throughput::Add(const RequestRow& row) {
  const int64_t window = windows_.At(row.began);
  if (!next_.has_value()) next_ = std::max(first_, window + 1);
  if (window < *next_) return;
  Sum& sum = sums_[window];
  sum.tokens += row.end.has_value() ? row.end->output_tokens : 0;
  sum.exposed |= row.exposed;
}

std::vector<WindowOutput> Throughput::Take(absl::Time until) {
  std::vector<WindowOutput> taken;
  const double seconds = absl::ToDoubleSeconds(windows_.length() - windows_.wash_out());
  for (; next_.has_value() && windows_.End(*next_) <= std::min(until, last_end_); ++*next_) {
    const auto found = sums_.extract(*next_);
    const Sum sum = found.empty() ? Sum() : found.mapped();
    taken.push_back({.window = *next_,
                     .exposed = sum.exposed,
                     .tokens_per_second = static_cast<double>(sum.tokens) / seconds});
  }
  return taken;
}

}  // namespace epikv
