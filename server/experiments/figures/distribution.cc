#include "server/experiments/figures/distribution.h"

#include <algorithm>
#include <cmath>

namespace epikv {
namespace {

constexpr double kWider = 1.02;
constexpr int kNumBounds = 30;
constexpr double kShares[] = {.1, .25, .5, .75, .9, .99};

}  // namespace

void ValueBins::Add(double value) {
  if (!(value >= 0) || !std::isfinite(value)) return;
  ++count_;
  if (value < 1e-12) {
    ++zeros_;
  } else {
    ++bins_[static_cast<int>(std::floor(std::log(value) / std::log(kWider)))];
  }
}

double ValueBins::MiddleOf(int bin) { return std::pow(kWider, bin + .5); }

double ValueBins::Quantile(double share) const {
  const double wanted = share * static_cast<double>(count_);
  double seen = static_cast<double>(zeros_);
  if (seen >= wanted) return 0;
  for (const auto& [bin, count] : bins_) {
    seen += static_cast<double>(count);
    if (seen >= wanted) return MiddleOf(bin);
  }
  return bins_.empty() ? 0 : MiddleOf(bins_.rbegin()->first);
}

std::vector<uint64_t> ValueBins::Counts(const std::vector<double>& bounds) const {
  std::vector<uint64_t> counts(bounds.size() + 1);
  counts.front() += static_cast<uint64_t>(zeros_);
  for (const auto& [bin, count] : bins_) {
    const auto place = std::lower_bound(bounds.begin(), bounds.end(), MiddleOf(bin));
    counts[static_cast<size_t>(place - bounds.begin())] += static_cast<uint64_t>(count);
  }
  return counts;
}

ValueBins& ValueBins::operator+=(const ValueBins& other) {
  count_ += other.count_;
  zeros_ += other.zeros_;
  for (const auto& [bin, count] : other.bins_) bins_[bin] += count;
  return *this;
}

std::vector<v1::Distribution> DistributionsOf(const std::string& metric,
                                              const std::vector<ValueBins>& arms) {
  ValueBins all;
  for (const ValueBins& arm : arms) all += arm;
  std::vector<double> bounds;
  if (all.count() > 0) {
    const double most = all.Quantile(.99);
    const double least = std::max(all.Quantile(.01), most / 1e6);
    for (int i = 0; i < kNumBounds && most > 0; ++i) {
      bounds.push_back(least * std::pow(most / least, i / double{kNumBounds - 1}));
    }
    bounds.erase(std::unique(bounds.begin(), bounds.end()), bounds.end());
  }
  std::vector<v1::Distribution> distributions;
  for (const ValueBins& arm : arms) {
    v1::Distribution& distribution = distributions.emplace_back();
    distribution.set_metric(metric);
    distribution.set_count(static_cast<uint64_t>(arm.count()));
    if (arm.count() == 0) continue;
    for (double share : kShares) distribution.add_quantiles(arm.Quantile(share));
    distribution.mutable_bounds()->Add(bounds.begin(), bounds.end());
    for (uint64_t count : arm.Counts(bounds)) distribution.add_counts(count);
  }
  return distributions;
}

}  // namespace epikv
