#include "policies/lane.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

namespace epikv {

const at::Tensor& Lane::index() {
  if (!index_.defined()) {
    const absl::Span<const int32_t> index = cache_.index(layer_, head_);
    index_ = at::tensor(at::ArrayRef<int32_t>(index.data(), index.size()), at::kInt).to(at::kLong);
  }
  return index_;
}

const at::Tensor& Lane::keys() {
  if (!keys_.defined()) keys_ = cache_.keys(layer_, head_).to(at::kFloat);
  return keys_;
}

const at::Tensor& Lane::values() {
  if (!values_.defined()) values_ = cache_.values(layer_, head_).to(at::kFloat);
  return values_;
}

at::Tensor Lane::column(int64_t place) const {
  const absl::Span<float> column = cache_.column(place, layer_, head_);
  return at::from_blob(column.data(), {static_cast<int64_t>(column.size())}, at::kFloat);
}

const at::Tensor& Lane::by_birth() {
  if (!by_birth_.defined()) by_birth_ = index().argsort();
  return by_birth_;
}

at::Tensor Lane::ToSlots(const at::Tensor& in_birth_order) {
  return at::empty_like(in_birth_order).index_copy_(0, by_birth(), in_birth_order);
}

const at::Tensor& Lane::queries() {
  if (!queries_.defined()) {
    queries_ = cache_.queries(layer_)
                   .narrow(1, head_ * group(), group())
                   .transpose(0, 1)
                   .to(at::kFloat)
                   .contiguous();
  }
  return queries_;
}

const at::Tensor& Lane::window_logits() {
  if (!window_logits_.defined()) {
    const int64_t first = cache_.newest() + 1 - queries().size(1);  // token of the oldest query
    window_logits_ = at::matmul(queries(), keys().t()).mul_(cache_.attention_scale(layer_));
    // Only tokens of the window are younger than a query of it.
    const at::Tensor slots = (index() > first).nonzero().squeeze(1);
    const at::Tensor asked = at::arange(first, cache_.newest() + 1, at::kLong).unsqueeze(1);
    const at::Tensor unseen = index().index_select(0, slots) > asked;  // [w, slots]
    window_logits_.index_copy_(-1, slots,
                               window_logits_.index_select(-1, slots).masked_fill_(
                                   unseen, -std::numeric_limits<float>::infinity()));
  }
  return window_logits_;
}

const at::Tensor& Lane::window_attention() {
  if (!window_attention_.defined()) {
    window_attention_ = window_logits().softmax(-1);
    // A query all of whose tokens have left gave nothing to those that stay.
    const int64_t w = queries().size(1), first = cache_.newest() + 1 - w;
    const int64_t gone = std::clamp<int64_t>(index().min().item<int64_t>() - first, 0, w);
    window_attention_.narrow(1, 0, gone).zero_();
  }
  return window_attention_;
}

const at::Tensor& Lane::unscored() {
  if (!unscored_.defined()) unscored_ = at::empty({0}, at::kLong);
  return unscored_;
}

at::Tensor Lane::output_projection() const {
  return cache_.output_projection(layer_).narrow(0, head_ * group(), group()).to(at::kFloat);
}

at::Tensor Lane::output_gram() const {
  return cache_.output_gram(layer_).narrow(0, head_ * group(), group());
}

uint64_t RoundStream(const CacheView& cache, int64_t layer, int64_t head) {
  return static_cast<uint64_t>(cache.newest() + 1) << 24 | (layer * cache.num_kv_heads() + head);
}

int64_t Lane::window_tokens() {
  return (index() > cache_.newest() - queries().size(1)).sum().item<int64_t>();
}

}  // namespace epikv
