#include "policies/expected_queries.h"

#include <ATen/ATen.h>

#include <cmath>

namespace epikv {
namespace {

// The mean of the rotations at positions [first, first + count): a query before RoPE, times its
// transpose, is the query rotated by each in turn, averaged. fp32 [width, width].
at::Tensor MeanRotation(const RopeShape& rope, int64_t first, int64_t count, int64_t width) {
  at::Tensor rotation = at::eye(width);
  const int64_t pairs = static_cast<int64_t>(rope.inv_freq.size());
  auto entry = rotation.accessor<float, 2>();
  for (int64_t i = 0; i < pairs; ++i) {
    // The mean of a geometric series of e^(i angle): its middle times a Dirichlet kernel.
    const double step = rope.inv_freq[i], n = static_cast<double>(count);
    const double middle = (static_cast<double>(first) + (n - 1) / 2) * step;
    const double half = std::sin(step / 2);
    const double kernel = half == 0 ? 1 : std::sin(n * step / 2) / (n * half);
    const double scale = rope.attention_factor * kernel;
    const double cos = std::cos(middle), sin = std::sin(middle);
    const int64_t a = rope.interleaved ? 2 * i : i, b = rope.interleaved ? 2 * i + 1 : i + pairs;
    entry[a][a] = entry[b][b] = static_cast<float>(cos * scale);
    entry[b][a] = static_cast<float>(sin * scale);
    entry[a][b] = static_cast<float>(-sin * scale);
  }
  return rotation;
}

}  // namespace

at::Tensor ExpectedQueries::Logits(const Lane& lane, const at::Tensor& keys,
                                   const CacheView::QueryMoments& moments,
                                   const RopeShape& rope) const {
  const CacheView& cache = lane.cache();
  const at::Tensor rotation =
      MeanRotation(rope, cache.next_position(lane.layer(), lane.head()), future, keys.size(1));
  const int64_t first = lane.head() * lane.group();
  const AttentionFacts attention = cache.attention(lane.layer());
  const double scale = attention.scale;
  at::Tensor mean = moments.mean.narrow(0, first, lane.group());  // [group, width]
  at::Tensor spread_of = moments.covariance.narrow(0, first, lane.group());
  // Queries are turned to where they will be, or few keys back to where those are: whichever is
  // less.
  const bool turns_keys = keys.size(0) < lane.group() * keys.size(1);
  const at::Tensor met = turns_keys ? keys.matmul(rotation) : keys;
  if (!turns_keys) {
    mean = mean.matmul(rotation.t());
    if (covariance) spread_of = at::matmul(rotation, at::matmul(spread_of, rotation.t()));
  }
  at::Tensor logits = at::matmul(mean, met.t()).mul_(scale);  // [group, n]
  at::Tensor spread;
  if (covariance) {
    spread = at::matmul(met, spread_of).mul_(met).sum(-1).mul_(scale * scale / 2);
  }
  if (attention.soft_cap.has_value()) {
    // The cap as its tangent at the mean: what is normal stays so.
    SoftCap(logits, attention);
    const at::Tensor slope = 1 - (logits / *attention.soft_cap).square();
    if (covariance) spread.mul_(slope.square());
  }
  if (covariance) logits += spread;
  return logits;
}

at::Tensor ExpectedQueries::LogVisible(Lane& lane, int64_t window) const {
  // The query at newest + 1 + i sees a token that is no further back than window - 1 tokens.
  const at::Tensor visible = lane.index() + (window - 1 - lane.cache().newest());
  return (visible.clamp(0, future).to(at::kFloat) / static_cast<double>(future)).log();
}

}  // namespace epikv
