#include "server/experiments/figures/sample_ratio.h"

#include <algorithm>
#include <boost/math/distributions/binomial.hpp>
#include <boost/math/distributions/chi_squared.hpp>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "runtime/base/require.h"

namespace epikv {
namespace {

// With so many in every arm the test alarms by mistake from 0.8 to 1.25 times in a thousand.
constexpr double kLeastExpected = 50;

// The chance that a binomial count is as far from what is expected as this one, on either side.
double BinomialPValue(int64_t count, int64_t trials, double share) {
  const boost::math::binomial distribution(static_cast<double>(trials), share);
  const double expected = static_cast<double>(trials) * share;
  // What is as far on the other side belongs to it, whatever the rounding.
  const double distance = std::abs(static_cast<double>(count) - expected) * (1 - 1e-12);
  const double low = std::floor(expected - distance);
  const double high = std::ceil(expected + distance);
  if (high - low < 1) return 1;
  double p = 0;
  if (low >= 0) p += boost::math::cdf(distribution, low);
  if (high <= static_cast<double>(trials)) {
    p += boost::math::cdf(boost::math::complement(distribution, high - 1));
  }
  return std::min(1., p);
}

}  // namespace

SampleRatio CheckSampleRatio(absl::Span<const int64_t> units, absl::Span<const double> weights) {
  Require(units.size() == weights.size(), "one weight an arm");
  const int64_t total = std::reduce(units.begin(), units.end());
  const double weight = std::reduce(weights.begin(), weights.end());
  Require(weight > 0, "no arm has a weight");
  SampleRatio ratio;
  int arms = 0;
  double least_expected = std::numeric_limits<double>::infinity();
  double least_p = 1;
  for (size_t arm = 0; arm < units.size(); ++arm) {
    const double expected = static_cast<double>(total) * weights[arm] / weight;
    if (weights[arm] <= 0 && units[arm] > 0) {
      return {.statistic = std::numeric_limits<double>::infinity(), .p_value = 0};
    }
    if (expected <= 0) continue;
    ++arms;
    const double excess = static_cast<double>(units[arm]) - expected;
    ratio.statistic += excess * excess / expected;
    least_expected = std::min(least_expected, expected);
  }
  if (arms < 2) return ratio;
  if (least_expected >= kLeastExpected) {
    ratio.p_value = boost::math::cdf(
        boost::math::complement(boost::math::chi_squared(arms - 1), ratio.statistic));
    return ratio;
  }
  for (size_t arm = 0; arm < units.size(); ++arm) {
    if (weights[arm] <= 0) continue;
    least_p = std::min(least_p, BinomialPValue(units[arm], total, weights[arm] / weight));
  }
  ratio.p_value = std::min(1., arms == 2 ? least_p : least_p * arms);
  return ratio;
}

SampleRatio CheckLosses(absl::Span<const int64_t> lost, absl::Span<const int64_t> settled) {
  Require(lost.size() == settled.size(), "one number an arm");
  std::vector<int64_t> kept;
  for (size_t arm = 0; arm < lost.size(); ++arm) kept.push_back(settled[arm] - lost[arm]);
  const int64_t all_lost = std::reduce(lost.begin(), lost.end());
  const int64_t all_kept = std::reduce(kept.begin(), kept.end());
  if (all_lost + all_kept == 0) return {};
  return CheckSampleRatio(all_lost <= all_kept ? lost : absl::MakeConstSpan(kept),
                          std::vector<double>(settled.begin(), settled.end()));
}

}  // namespace epikv
