#include "policies/gated_policy.h"

#include <algorithm>

namespace epikv {

void GatedPolicy::Observe(absl::Span<SequenceStep> steps) const {
  for (SequenceStep& step : steps) {
    const int64_t heads = step.cache.num_kv_heads(), numbers = gate_->numbers();
    for (int64_t layer = 0; layer < step.cache.num_layers(); ++layer) {
      for (int64_t head = 0; head < heads; ++head) {
        const absl::Span<const int32_t> index = step.cache.index(layer, head);
        // Most often they are the last.
        int64_t left = std::min(step.count, step.first + step.count - delay_);
        for (size_t slot = index.size(); left > 0 && slot-- > 0;) {
          const int64_t token = index[slot] + delay_ - step.first;
          if (token < 0 || token >= step.count) continue;
          const int64_t place = ((layer * step.count + token) * heads + head) * numbers;
          for (int64_t i = 0; i < numbers; ++i) {
            step.cache.column(kSaid + i, layer, head)[slot] = step.signals.gate[place + i];
          }
          --left;
        }
      }
    }
  }
}

}  // namespace epikv
