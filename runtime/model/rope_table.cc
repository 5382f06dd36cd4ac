#include "runtime/model/rope_table.h"

#include <cmath>

namespace epikv {

RopeTable::RopeTable(const Rope& rope, int64_t context_length)
    : half_(static_cast<int64_t>(rope.inv_freq.size())),
      interleaved_(rope.layout == Rope::Layout::kInterleaved),
      values_(context_length * 2 * half_) {
  for (int64_t position = 0; position < context_length; ++position) {
    float* row = values_.data() + position * 2 * half_;
    for (int64_t i = 0; i < half_; ++i) {
      const double angle = static_cast<float>(position) * static_cast<float>(rope.inv_freq[i]);
      row[i] = static_cast<float>(std::cos(angle) * rope.attention_factor);
      row[half_ + i] = static_cast<float>(std::sin(angle) * rope.attention_factor);
    }
  }
}

}  // namespace epikv
