#include "policies/expected_queries.h"

#include <ATen/ATen.h>

#include <cmath>
#include <vector>

#include "policies/loops.h"

namespace epikv {
namespace {

// The mean of the rotations of a pair of channels, a and b: a becomes a cos - b sin, b becomes
// b cos + a sin.
struct PairRotation {
  int64_t a, b;
  float cos, sin;
};

// Of all pairs, at positions [first, first + count).
std::vector<PairRotation> MeanRotations(const RopeShape& rope, int64_t first, int64_t count) {
  const int64_t pairs = static_cast<int64_t>(rope.inv_freq.size());
  std::vector<PairRotation> rotations;
  rotations.reserve(pairs);
  for (int64_t i = 0; i < pairs; ++i) {
    // The mean of a geometric series of e^(i angle): its middle times a Dirichlet kernel.
    const double step = rope.inv_freq[i], n = static_cast<double>(count);
    const double middle = (static_cast<double>(first) + (n - 1) / 2) * step;
    const double half = std::sin(step / 2);
    const double kernel = half == 0 ? 1 : std::sin(n * step / 2) / (n * half);
    const double scale = rope.attention_factor * kernel;
    rotations.push_back({.a = rope.interleaved ? 2 * i : i,
                         .b = rope.interleaved ? 2 * i + 1 : i + pairs,
                         .cos = static_cast<float>(std::cos(middle) * scale),
                         .sin = static_cast<float>(std::sin(middle) * scale)});
  }
  return rotations;
}

// A query before RoPE, times the transpose of this, is the query rotated by each in turn, averaged.
// fp32 [width, width].
at::Tensor MeanRotation(const RopeShape& rope, int64_t first, int64_t count, int64_t width) {
  at::Tensor rotation = at::eye(width);
  auto entry = rotation.accessor<float, 2>();
  for (const auto& [a, b, cos, sin] : MeanRotations(rope, first, count)) {
    entry[a][a] = entry[b][b] = cos;
    entry[b][a] = sin;
    entry[a][b] = -sin;
  }
  return rotation;
}

}  // namespace

at::Tensor ExpectedQueries::Logits(const Lane& lane, const at::Tensor& keys,
                                   const CacheView::QueryMoments& moments,
                                   const RopeShape& rope) const {
  constexpr int64_t kFew = 128;
  if (keys.size(0) <= kFew) return LogitsOfFew(lane, keys, moments, rope);
  const CacheView& cache = lane.cache();
  const at::Tensor rotation =
      MeanRotation(rope, cache.next_position(lane.layer(), lane.head()), future, keys.size(1));
  const int64_t first = lane.head() * lane.group();
  const AttentionFacts attention = cache.attention(lane.layer());
  const double scale = attention.scale;
  at::Tensor mean = moments.mean.narrow(0, first, lane.group());  // [group, width]
  at::Tensor spread_of = moments.covariance.narrow(0, first, lane.group());
  mean = mean.matmul(rotation.t());                            // to where the queries will be
  at::Tensor logits = at::matmul(mean, keys.t()).mul_(scale);  // [group, n]
  at::Tensor spread;
  if (covariance) {
    spread_of = at::matmul(rotation, at::matmul(spread_of, rotation.t()));
    spread = at::matmul(keys, spread_of).mul_(keys).sum(-1).mul_(scale * scale / 2);
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

// Turns the keys back, which is less than turning the queries, and multiplies by plain loops: a
// product of tensors takes longer to call than to reckon.
at::Tensor ExpectedQueries::LogitsOfFew(const Lane& lane, const at::Tensor& keys,
                                        const CacheView::QueryMoments& moments,
                                        const RopeShape& rope) const {
  const CacheView& cache = lane.cache();
  const int64_t n = keys.size(0), width = keys.size(1), group = lane.group();
  const int64_t first = lane.head() * group;
  const at::Tensor rows = keys.contiguous();
  std::vector<float> turned(rows.const_data_ptr<float>(),
                            rows.const_data_ptr<float>() + rows.numel());
  for (const auto& [a, b, cos, sin] :
       MeanRotations(rope, cache.next_position(lane.layer(), lane.head()), future)) {
    for (float* key = turned.data(); key != turned.data() + turned.size(); key += width) {
      const float before = key[a];
      key[a] = before * cos + key[b] * sin;
      key[b] = key[b] * cos - before * sin;
    }
  }
  at::Tensor logits = at::empty({group, n}, at::kFloat);
  float* const logit = logits.mutable_data_ptr<float>();
  std::vector<float> spread(group * n);
  const at::Tensor mean = moments.mean.contiguous(), spread_of = moments.covariance.contiguous();
  MeetNormal(turned.data(), n, width, mean.const_data_ptr<float>() + first * width,
             covariance ? spread_of.const_data_ptr<float>() + first * width * width : nullptr,
             group, logit, spread.data());
  const AttentionFacts attention = cache.attention(lane.layer());
  const auto scale = static_cast<float>(attention.scale);
  for (int64_t i = 0; i < group * n; ++i) {
    float of_mean = scale * logit[i], slope = 1;
    if (attention.soft_cap.has_value()) {
      const auto cap = static_cast<float>(*attention.soft_cap);
      of_mean = cap * std::tanh(of_mean / cap);
      slope = 1 - of_mean / cap * (of_mean / cap);
    }
    logit[i] = of_mean + scale * scale / 2 * spread[i] * slope * slope;
  }
  return logits;
}

at::Tensor ExpectedQueries::LogVisible(Lane& lane, int64_t window) const {
  // The query at newest + 1 + i sees a token that is no further back than window - 1 tokens.
  const at::Tensor visible = lane.index() + (window - 1 - lane.cache().newest());
  return (visible.clamp(0, future).to(at::kFloat) / static_cast<double>(future)).log();
}

}  // namespace epikv
