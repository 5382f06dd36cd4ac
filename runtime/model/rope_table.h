#pragma once

#include <cstdint>
#include <vector>

#include "runtime/model/manifest.h"

namespace epikv {

// Cosines and sines of one Rope at every position of the context, as Rotate (kernels.h) takes them.
// Angles are fp32 products, as models were trained with. Immutable.
class RopeTable {
 public:
  RopeTable(const Rope& rope, int64_t context_length);

  // [rotary / 2] cosines, then as many sines.
  const float* at(int64_t position) const { return values_.data() + position * 2 * half_; }
  int64_t half() const { return half_; }
  bool interleaved() const { return interleaved_; }

 private:
  const int64_t half_;
  const bool interleaved_;
  std::vector<float> values_;  // [context_length, 2 x half]
};

}  // namespace epikv
