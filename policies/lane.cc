#include "policies/lane.h"

#include <ATen/ATen.h>

#include <limits>
#include <vector>

#include "policies/products.h"

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
  if (by_birth_.defined()) return by_birth_;
  const absl::Span<const int32_t> tokens = cache_.index(layer_, head_);
  // A look at every token there was is quicker than a sort, where many of them are left.
  if (cache_.newest() > 16 * std::ssize(tokens)) return by_birth_ = index().argsort();
  std::vector<int32_t> slot_of(cache_.newest() + 1, -1);
  for (size_t slot = 0; slot < tokens.size(); ++slot) {
    slot_of[tokens[slot]] = static_cast<int32_t>(slot);
  }
  by_birth_ = at::empty({std::ssize(tokens)}, at::kLong);
  int64_t* next = by_birth_.mutable_data_ptr<int64_t>();
  for (const int32_t slot : slot_of) {
    if (slot >= 0) *next++ = slot;
  }
  return by_birth_;
}

at::Tensor Lane::ToSlots(const at::Tensor& in_birth_order) {
  return at::empty_like(in_birth_order).index_copy_(0, by_birth(), in_birth_order);
}

const at::Tensor& Lane::queries() {
  if (!queries_.defined()) queries_ = OwnHeads(cache_.queries(layer_));
  return queries_;
}

const at::Tensor& Lane::lookahead() {
  if (!lookahead_.defined()) lookahead_ = OwnHeads(cache_.lookahead(layer_));
  return lookahead_;
}

at::Tensor Lane::OwnHeads(const at::Tensor& queries) const {
  return queries.narrow(1, head_ * group(), group()).transpose(0, 1).to(at::kFloat).contiguous();
}

at::Tensor Lane::Logits(int64_t count) {
  const AttentionFacts attention = cache_.attention(layer_);
  at::Tensor asking = queries().narrow(1, queries().size(1) - count, count);
  const int64_t ahead = lookahead().size(1);
  if (ahead > 0) asking = at::cat({asking, lookahead()}, 1);
  at::Tensor logits = Products(asking, keys()).mul_(attention.scale);
  SoftCap(logits, attention);
  const int64_t first = cache_.newest() + 1 - count;  // token of the oldest query
  const at::Tensor asked = at::arange(first, cache_.newest() + 1 + ahead, at::kLong).unsqueeze(1);
  // Hides those tokens among `slots`, a few of all, for which `unseen` [count, slots] holds.
  auto hide = [&](const at::Tensor& slots, const at::Tensor& unseen) {
    logits.index_copy_(-1, slots,
                       logits.index_select(-1, slots).masked_fill_(
                           unseen, -std::numeric_limits<float>::infinity()));
  };
  // Only tokens of the window are younger than a query of it.
  const at::Tensor young = (index() > first).nonzero().squeeze(1);
  hide(young, index().index_select(0, young) > asked);
  if (attention.window.has_value()) {
    const at::Tensor old =
        (index() <= cache_.newest() + ahead - *attention.window).nonzero().squeeze(1);
    hide(old, index().index_select(0, old) <= asked - *attention.window);
  }
  return logits;
}

const at::Tensor& Lane::window_logits() {
  if (!window_logits_.defined()) window_logits_ = Logits(queries().size(1));
  return window_logits_;
}

const at::Tensor& Lane::window_attention() {
  if (!window_attention_.defined()) window_attention_ = SoftmaxOfSeen(window_logits());
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

at::Tensor SoftmaxOfSeen(const at::Tensor& logits) {
  at::Tensor weights = logits.softmax(-1);
  if (logits.size(-1) == 0) return weights;
  const at::Tensor suspects = weights.select(-1, 0).isnan();  // NaN stays, if a logit was
  if (suspects.any().item<bool>()) {
    const at::Tensor blind = logits.amax(-1).isneginf();  // NaN is not
    weights.masked_fill_(blind.unsqueeze(-1), 0);
  }
  return weights;
}

void SoftCap(at::Tensor& logits, const AttentionFacts& attention) {
  if (!attention.soft_cap.has_value()) return;
  logits.div_(*attention.soft_cap).tanh_().mul_(*attention.soft_cap);
}

uint64_t RoundStream(const CacheView& cache, int64_t layer, int64_t head) {
  const int64_t lane = layer * cache.all_kv_heads() + cache.first_kv_head() + head;
  return static_cast<uint64_t>(cache.newest() + 1) << 24 | lane;
}

int64_t Lane::window_tokens() {
  return (index() > cache_.newest() - queries().size(1)).sum().item<int64_t>();
}

}  // namespace epikv
