#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "policies/cache_view.h"

namespace epikv {

// Mean and covariance of one sequence's queries before RoPE, layer by layer, in fp32, from token
// CacheView::kFirstMeasuredQuery on. Blocks are merged by Chan, Golub and LeVeque's update, which
// loses no digits where the mean is large. Engine thread.
class QueryMomentsTap {
 public:
  // num_layers 0: takes nothing and holds nothing.
  QueryMomentsTap(int64_t num_layers, int64_t num_heads, int64_t key_width,
                  at::Device device = at::kCPU);

  // Of a sequence that goes on alone from here.
  QueryMomentsTap Clone() const;

  // Takes a layer's queries of the step that runs: [n, num_heads, key_width], of tokens from
  // `first` on; one of an item ahead.
  void Take(int64_t layer, const at::Tensor& queries, int64_t first, int64_t ahead = 0);
  // The step is committed.
  void Commit(int64_t ahead = 0);

  CacheView::QueryMoments Read(int64_t layer);

 private:
  struct Layer {
    int64_t count = 0;
    at::Tensor mean,
        squares;  // [heads, width]; sum of (q - mean)(q - mean)^T, [heads, width, width]
    std::vector<at::Tensor> pending;  // [heads, width]; kPendingQueries are added in one product
    // [heads, width] of the step that runs, by WorkItem::ahead; undefined: none.
    std::vector<at::Tensor> taken = std::vector<at::Tensor>(1);
    CacheView::QueryMoments block;  // of a step with several tokens, in place of `taken`
  };
  static CacheView::QueryMoments MomentsOf(const at::Tensor& rows);
  static void Merge(const CacheView::QueryMoments& block, Layer& layer);
  static void Fold(Layer& layer);

  std::vector<Layer> layers_;
};

}  // namespace epikv
