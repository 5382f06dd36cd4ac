#include "runtime/signals/query_moments.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "runtime/signals/signals.h"

namespace epikv {

QueryMomentsTap::QueryMomentsTap(int64_t num_layers, int64_t num_heads, int64_t key_width,
                                 at::Device device)
    : layers_(num_layers) {
  for (Layer& layer : layers_) {
    layer.mean = at::zeros({num_heads, key_width}, device);
    layer.squares = at::zeros({num_heads, key_width, key_width}, device);
  }
}

QueryMomentsTap QueryMomentsTap::Clone() const {
  QueryMomentsTap copy = *this;
  for (Layer& layer : copy.layers_) {  // what is added to in place; the rest is only replaced
    layer.mean = layer.mean.clone();
    layer.squares = layer.squares.clone();
  }
  return copy;
}

void QueryMomentsTap::Take(int64_t layer, const at::Tensor& queries, int64_t first, int64_t ahead) {
  const int64_t skipped =
      std::clamp<int64_t>(CacheView::kFirstMeasuredQuery - first, 0, queries.size(0));
  const at::Tensor rows = queries.narrow(0, skipped, queries.size(0) - skipped);
  Layer& of = layers_[layer];
  if (std::ssize(of.taken) <= ahead) of.taken.resize(ahead + 1);
  at::Tensor& taken = of.taken[ahead];
  taken = at::Tensor();
  of.block = {};
  if (rows.size(0) == 1) taken = rows[0].to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  if (rows.size(0) > 1) of.block = MomentsOf(rows.to(at::kFloat));
}

void QueryMomentsTap::Commit(int64_t ahead) {
  for (Layer& layer : layers_) {
    at::Tensor taken = std::exchange(layer.taken[ahead], at::Tensor());
    if (taken.defined()) layer.pending.push_back(std::move(taken));
    if (layer.block.count > 0) Merge(layer.block, layer);
    layer.block = {};
    if (std::ssize(layer.pending) == kPendingQueries) Fold(layer);
  }
}

CacheView::QueryMoments QueryMomentsTap::Read(int64_t layer) {
  Layer& of = layers_[layer];
  Fold(of);
  return {.count = of.count,
          .mean = of.mean,
          .covariance = of.squares / static_cast<double>(std::max<int64_t>(1, of.count))};
}

CacheView::QueryMoments QueryMomentsTap::MomentsOf(const at::Tensor& rows) {
  const at::Tensor mean = rows.mean(0);                         // [heads, width]
  const at::Tensor centred = (rows - mean).permute({1, 2, 0});  // [heads, width, n]
  return {.count = rows.size(0),
          .mean = mean,
          .covariance =
              at::matmul(centred, centred.transpose(1, 2)) / static_cast<double>(rows.size(0))};
}

void QueryMomentsTap::Merge(const CacheView::QueryMoments& block, Layer& layer) {
  const double before = static_cast<double>(layer.count), more = static_cast<double>(block.count);
  const at::Tensor apart = block.mean - layer.mean;
  layer.squares += block.covariance * more;
  layer.squares += apart.unsqueeze(-1) * apart.unsqueeze(-2) * (before * more / (before + more));
  layer.mean += apart * (more / (before + more));
  layer.count += block.count;
}

void QueryMomentsTap::Fold(Layer& layer) {
  if (layer.pending.empty()) return;
  Merge(MomentsOf(at::stack(layer.pending)), layer);
  layer.pending.clear();
}

}  // namespace epikv
