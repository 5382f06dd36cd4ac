#include "runtime/step/step_item.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace epikv {

at::Tensor EntropiesOf(const at::Tensor& logits) {
  const int64_t count = std::min(Signals::kEntropyTokens, logits.size(1));
  const at::Tensor log_p = std::get<0>(logits.topk(count, -1)).log_softmax(-1);
  return -(log_p.exp() * log_p).sum(-1);
}

at::Tensor DistancesOf(const std::vector<at::Tensor>& residuals) {
  const at::Tensor last = residuals.back().to(at::kFloat);
  std::vector<at::Tensor> distances;
  distances.reserve(residuals.size());
  for (const at::Tensor& residual : residuals) {
    distances.push_back(1 - at::cosine_similarity(residual.to(at::kFloat), last, 1));
  }
  return at::stack(distances);
}

}  // namespace epikv
