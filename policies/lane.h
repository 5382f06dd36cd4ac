#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

#include "policies/cache_view.h"

namespace epikv {

// One lane during a round, as scorers and decorators read it: fp32, by slot, each tensor made at
// most once. n: slots in use; w: queries of the window; group: query heads of the KV head. Lives no
// longer than the round.
class Lane {
 public:
  Lane(CacheView& cache, int64_t layer, int64_t head) : cache_(cache), layer_(layer), head_(head) {}

  CacheView& cache() const { return cache_; }
  int64_t layer() const { return layer_; }
  int64_t head() const { return head_; }
  int64_t group() const { return cache_.num_heads() / cache_.num_kv_heads(); }

  const at::Tensor& index();   // birth order of the token in each slot. int64 [n]
  const at::Tensor& keys();    // [n, key_width]
  const at::Tensor& values();  // [n, value_width]
  // CacheView's, in place. fp32 [n]
  at::Tensor column(int64_t place) const;

  // Slots from the oldest token to the newest. int64 [n]. For scores that look at neighbours:
  // x.index_select(0, by_birth()) is in birth order, and ToSlots turns that back.
  const at::Tensor& by_birth();
  at::Tensor ToSlots(const at::Tensor& in_birth_order);

  // Of the newest w tokens, oldest first. [group, w, key_width]
  const at::Tensor& queries();
  // Of tokens that were told ahead: CacheView::lookahead. [group, m, key_width]
  const at::Tensor& lookahead();
  // Of the newest `count` queries, and behind them of those told ahead: logits as the layer has
  // them, soft-capped; -inf where the query does not see the token, which is younger or beyond the
  // layer's window. [group, count + m, n]
  at::Tensor Logits(int64_t count);
  const at::Tensor& window_logits();  // of all w, and m
  // The softmax of that over all n. [group, w + m, n]
  const at::Tensor& window_attention();
  // Tokens of the window that are still cached: the newest of the lane.
  int64_t window_tokens();

  // Slots whose score is not of their own but the highest of the others (WithWindow): the window's.
  // Empty until a scorer says so. int64
  const at::Tensor& unscored();
  void set_unscored(at::Tensor slots) { unscored_ = std::move(slots); }

  // CacheView's of the lane's query heads, in fp32. [group, value_width, hidden]
  at::Tensor output_projection() const;
  at::Tensor output_gram() const;  // [group, value_width, value_width]

 private:
  CacheView& cache_;
  const int64_t layer_, head_;
  // Of a layer's query heads, those of the lane. [count, num_heads, width] -> [group, count, width]
  at::Tensor OwnHeads(const at::Tensor& queries) const;

  at::Tensor index_, keys_, values_, by_birth_, queries_, lookahead_, window_logits_,
      window_attention_, unscored_;
};

// Softmax over the last dimension; zeros where no logit is above -inf: such a query gave nothing to
// the tokens that are left.
at::Tensor SoftmaxOfSeen(const at::Tensor& logits);

// Brings scaled logits under a layer's soft cap, in place.
void SoftCap(at::Tensor& logits, const AttentionFacts& attention);

// CounterRng's stream of a lane in this round: no other lane or round has it.
uint64_t RoundStream(const CacheView& cache, int64_t layer, int64_t head);

}  // namespace epikv
