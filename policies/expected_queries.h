#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "policies/lane.h"
#include "policies/spec.h"

// What the next queries of a head can be expected to ask, taken as normal with the mean and
// covariance of those so far (Expected Attention, arXiv 2510.00636, section 3).

namespace epikv {

struct ExpectedQueries {
  int64_t future = 512;    // positions over which the queries' rotation is averaged
  bool covariance = true;  // whether their spread counts beside their mean

  // The log of the expected exp(logit) of each of `keys` [n, key_width], which are of the lane,
  // fp32: k.mu scale + k cov k scale^2 / 2. [group, n]. rope: the layer's.
  at::Tensor Logits(const Lane& lane, const at::Tensor& keys,
                    const CacheView::QueryMoments& moments, const RopeShape& rope) const;

  // Log of the share of them that see each of the lane's tokens, in a layer with a window. [n]
  at::Tensor LogVisible(Lane& lane, int64_t window) const;

 private:
  at::Tensor LogitsOfFew(const Lane& lane, const at::Tensor& keys,
                         const CacheView::QueryMoments& moments, const RopeShape& rope) const;
};

}  // namespace epikv
