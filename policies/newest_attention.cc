#include "policies/newest_attention.h"

#include <ATen/ATen.h>

#include "policies/lane.h"

namespace epikv {

bool EndsInQuery(const SequenceStep& step) {
  return step.phase == Phase::kDecode || step.first + step.count == step.cache.prompt_tokens();
}

at::Tensor NewestAttention(const SequenceStep& step, int64_t layer, int64_t head) {
  if (step.phase == Phase::kPrefill) {
    return Lane(step.cache, layer, head).window_attention().select(1, -1).mean(0);
  }
  const absl::Span<const float> row = step.signals.attention->at(layer, head);
  return at::from_blob(const_cast<float*>(row.data()), {static_cast<int64_t>(row.size())},
                       at::kFloat);
}

}  // namespace epikv
