#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "epikv/v1/experiment.pb.h"

namespace epikv {

// How values >= 0 are spread, in bins each 2 % wider than the one before. One thread at a time.
class ValueBins {
 public:
  void Add(double value);

  int64_t count() const { return count_; }
  // The value that this share of all are at most, within 2 %. Precondition: count() > 0.
  double Quantile(double share) const;
  // Counts up to each bound, from the bound before, and beyond the last.
  std::vector<uint64_t> Counts(const std::vector<double>& bounds) const;
  ValueBins& operator+=(const ValueBins& other);

 private:
  static double MiddleOf(int bin);

  int64_t count_ = 0, zeros_ = 0;
  std::map<int, int64_t> bins_;
};

// Of one metric in several arms, with the same bounds: from the hundredth of all values to the 99
// hundredth, in equal steps of the logarithm.
std::vector<v1::Distribution> DistributionsOf(const std::string& metric,
                                              const std::vector<ValueBins>& arms);

}  // namespace epikv
