#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

// Inner loops over what a lane holds, and over logits, compiled for the processor found at
// start-up. Without torch.

namespace epikv {

// Adds 1 to the count of each of a query's logits to which softmax gives less than their mean.
// logits, count: [n], n > 0. Returns the sum of exp(logit - largest): NaN if a logit is, or is
// infinity.
float CountBelowMean(const float* logits, int64_t n, uint32_t* count);

// log(sum(exp(x))) of those of x that are at least `least`; NaN if one of x is, or is infinity, or
// if none is above -infinity.
float LogSumExp(absl::Span<const float> x, float least);

// Entropy of softmax(logits), in nats; NaN if a logit is, or is infinity. Those that are -infinity
// have no share. logits: [n], n > 0.
float Entropy(absl::Span<const float> logits);

// out[i] = of_group[index[i] / group_size]; index: from 0. [n]
void SpreadGroups(absl::Span<const int32_t> index, int64_t group_size, const float* of_group,
                  float* out);

// The least and the most of rows channel by channel; NaN where one is no finite number. rows: [n,
// width], n > 0; low, high: [width].
void BoundChannels(absl::Span<const float* const> rows, int64_t width, float* low, float* high);

// Adds to each of `sum` how unevenly a row lies over its channels [first, first + width): the
// deviation (over width - 1) of (row - low) * factor, which go by the row's channels. sum: [rows]
void AddDeviations(absl::Span<const float* const> rows, int64_t first, int64_t width,
                   const float* low, const float* factor, float* sum);

// y = weight x + bias. weight: [out, in]; x: [in]; bias, y: [out].
void Affine(const float* weight, const float* bias, const float* x, int64_t out, int64_t in,
            float* y);

// Of each key, by head: of_mean = key . mean, of_spread = key covariance key. Without a covariance
// (nullptr) of_spread is left as it is. keys: [n, width]; mean: [heads, width]; covariance: [heads,
// width, width]; of_mean, of_spread: [heads, n].
void MeetNormal(const float* keys, int64_t n, int64_t width, const float* mean,
                const float* covariance, int64_t heads, float* of_mean, float* of_spread);

// What bounds the keys of sets of tokens channel by channel, in blocks of sets that a query meets
// side by side.
class KeyBounds {
 public:
  static constexpr int64_t kBlock = 16;

  KeyBounds() = default;
  KeyBounds(int64_t key_width, int64_t sets);  // none yet, and room for as many

  int64_t size() const { return size_; }
  void Add(const float* key);  // a set of this one
  void AddCopy(const KeyBounds& other, int64_t set);
  void Widen(int64_t set, const float* key);  // what is no number stays one's bound

  // The most that a key within the bounds may give a query, product by product: [queries,
  // stride()], of which size() count. queries: [n, key_width].
  int64_t stride() const { return (size_ + kBlock - 1) / kBlock * kBlock; }
  std::vector<float> Most(absl::Span<const float> queries) const;

 private:
  // The low bound of a set's first channel. Its high one is kBlock further, the next channel's 2.
  int64_t At(int64_t set) const { return set / kBlock * 2 * kBlock * width_ + set % kBlock; }
  int64_t Append();

  int64_t width_ = 0, size_ = 0;
  std::vector<float> bounds_;  // [stride / kBlock, key_width, low and high, kBlock]
};

}  // namespace epikv
