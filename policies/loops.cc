#include "policies/loops.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "policies/clones.h"

namespace epikv {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Numbers side by side: of KeyBounds, a channel's low or high bounds of a block of sets.
using Block = float __attribute__((vector_size(KeyBounds::kBlock * sizeof(float))));
constexpr int64_t kTile = 4;  // queries whose sums are in registers together

// up, down: of each channel what is above 0, and below, in kTile queries. [width, kTile]
EPIKV_CLONES void MostOfTile(const float* bounds, int64_t blocks, int64_t width, const float* up,
                             const float* down, float* most) {
  for (int64_t block = 0; block < blocks; ++block) {
    Block sum[kTile] = {};
    for (int64_t channel = 0; channel < width; ++channel, bounds += 2 * KeyBounds::kBlock) {
      Block low, high;
      std::memcpy(&low, bounds, sizeof(Block));
      std::memcpy(&high, bounds + KeyBounds::kBlock, sizeof(Block));
      for (int64_t query = 0; query < kTile; ++query) {
        sum[query] += up[channel * kTile + query] * high + down[channel * kTile + query] * low;
      }
    }
    for (int64_t query = 0; query < kTile; ++query) {
      std::memcpy(most + (query * blocks + block) * KeyBounds::kBlock, &sum[query], sizeof(Block));
    }
  }
}

// Adds key covariance key of each key in a block, over kRows rows of the covariance from `first`
// on. keys: [width, kBlock]; covariance: [width, width].
template <int64_t kRows>
EPIKV_INLINE void AddQuadraticOfRows(const float* keys, int64_t width, int64_t first,
                                     const float* covariance, Block* quadratic) {
  Block sum[kRows] = {}, key;
  const float* const rows = covariance + first * width;
  for (int64_t channel = 0; channel < width; ++channel) {
    std::memcpy(&key, keys + channel * KeyBounds::kBlock, sizeof(Block));
    for (int64_t row = 0; row < kRows; ++row) sum[row] += rows[row * width + channel] * key;
  }
  for (int64_t row = 0; row < kRows; ++row) {
    std::memcpy(&key, keys + (first + row) * KeyBounds::kBlock, sizeof(Block));
    *quadratic += sum[row] * key;
  }
}

// keys: a block, [width, kBlock]; of_mean: [kBlock].
EPIKV_CLONES void MeetMean(const float* keys, int64_t width, const float* mean, float* of_mean) {
  Block dot = {}, key;
  for (int64_t channel = 0; channel < width; ++channel) {
    std::memcpy(&key, keys + channel * KeyBounds::kBlock, sizeof(Block));
    dot += mean[channel] * key;
  }
  std::memcpy(of_mean, &dot, sizeof(Block));
}

EPIKV_CLONES void MeetSpread(const float* keys, int64_t width, const float* covariance,
                             float* of_spread) {
  Block quadratic = {};
  int64_t row = 0;
  for (; row + kTile <= width; row += kTile) {
    AddQuadraticOfRows<kTile>(keys, width, row, covariance, &quadratic);
  }
  for (; row < width; ++row) AddQuadraticOfRows<1>(keys, width, row, covariance, &quadratic);
  std::memcpy(of_spread, &quadratic, sizeof(Block));
}

EPIKV_CLONES void SpreadInto(const int32_t* index, int64_t n, double inverse, const float* of_group,
                             float* out) {
  // Half a token further, a quotient is never as near a whole number as it is wrong.
  for (int64_t i = 0; i < n; ++i) {
    out[i] = of_group[static_cast<int32_t>((index[i] + 0.5) * inverse)];
  }
}

// By blocks: a loop over single numbers, whose order matters to what is none, is not vectorised.
EPIKV_INLINE float Largest(const float* x, int64_t n) {
  Block block, largest = Block{} + kNothing;
  const int64_t whole = n / KeyBounds::kBlock * KeyBounds::kBlock;
  for (int64_t i = 0; i < whole; i += KeyBounds::kBlock) {
    std::memcpy(&block, x + i, sizeof(Block));
    largest = block > largest ? block : largest;
  }
  float top = kNothing;
  for (int64_t i = 0; i < KeyBounds::kBlock; ++i) top = std::max(top, largest[i]);
  for (int64_t i = whole; i < n; ++i) top = std::max(top, x[i]);
  return top;
}

EPIKV_CLONES float LogSumExpOf(const float* x, int64_t n, float least) {
  const float top = Largest(x, n);
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] < least ? 0.0f : ExpNegative(x[i] - top);
  return top + std::log(sum);
}

EPIKV_CLONES float EntropyOf(const float* x, int64_t n) {
  const float top = Largest(x, n);
  float sum = 0, weighed = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float below = x[i] - top, share = ExpNegative(below);
    sum += share;
    weighed += share * (below < -87.0f ? 0.0f : below);  // not 0 times -infinity
  }
  return std::log(sum) - weighed / sum;
}

// X: channels side by side, from `channel` on.
template <class X>
EPIKV_INLINE void BoundAt(const float* const* rows, int64_t n, int64_t channel, float* low,
                          float* high) {
  X x, least, most, none = {};  // none: 0, or NaN
  std::memcpy(&least, rows[0] + channel, sizeof(X));
  most = least;
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(&x, rows[i] + channel, sizeof(X));
    least = x < least ? x : least;
    most = x > most ? x : most;
    none += x - x;  // NOLINT(misc-redundant-expression): NaN of NaN and of infinity
  }
  least += none;
  most += none;
  std::memcpy(low + channel, &least, sizeof(X));
  std::memcpy(high + channel, &most, sizeof(X));
}

EPIKV_CLONES void BoundInto(const float* const* rows, int64_t n, int64_t width, float* low,
                            float* high) {
  int64_t channel = 0;
  for (; channel + KeyBounds::kBlock <= width; channel += KeyBounds::kBlock) {
    BoundAt<Block>(rows, n, channel, low, high);
  }
  for (; channel < width; ++channel) BoundAt<float>(rows, n, channel, low, high);
}

// low, factor: of the first channel on. scaled: room for [width].
EPIKV_CLONES void AddDeviationsTo(const float* const* rows, int64_t n, int64_t first, int64_t width,
                                  const float* low, const float* factor, float* scaled,
                                  float* sum) {
  for (int64_t i = 0; i < n; ++i) {
    const float* const row = rows[i] + first;
    // Rows lie anywhere: those to come are fetched line by line before their turn.
    constexpr int64_t kAhead = 8, kLine = 64 / sizeof(float);
    for (int64_t c = 0; i + kAhead < n && c < width; c += kLine) {
      __builtin_prefetch(rows[i + kAhead] + first + c);
    }
    float total = 0, squares = 0;
    for (int64_t c = 0; c < width; ++c) {
      scaled[c] = (row[c] - low[c]) * factor[c];
      total += scaled[c];
    }
    const float mean = total / static_cast<float>(width);
    for (int64_t c = 0; c < width; ++c) {
      const float off = scaled[c] - mean;
      squares += off * off;
    }
    sum[i] += std::sqrt(squares / static_cast<float>(width - 1));
  }
}

}  // namespace

void BoundChannels(absl::Span<const float* const> rows, int64_t width, float* low, float* high) {
  BoundInto(rows.data(), std::ssize(rows), width, low, high);
}

void AddDeviations(absl::Span<const float* const> rows, int64_t first, int64_t width,
                   const float* low, const float* factor, float* sum) {
  std::vector<float> scaled(width);
  AddDeviationsTo(rows.data(), std::ssize(rows), first, width, low + first, factor + first,
                  scaled.data(), sum);
}

EPIKV_CLONES float CountBelowMean(const float* logits, int64_t n, uint32_t* count) {
  const float top = Largest(logits, n);
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += ExpNegative(logits[i] - top);
  // exp(logit - top) / sum < 1 / n
  const float mean = top + std::log(sum / static_cast<float>(n));
  for (int64_t i = 0; i < n; ++i) count[i] += logits[i] < mean ? 1 : 0;
  return sum;
}

float LogSumExp(absl::Span<const float> x, float least) {
  return LogSumExpOf(x.data(), static_cast<int64_t>(x.size()), least);
}

float Entropy(absl::Span<const float> logits) {
  return EntropyOf(logits.data(), static_cast<int64_t>(logits.size()));
}

void SpreadGroups(absl::Span<const int32_t> index, int64_t group_size, const float* of_group,
                  float* out) {
  SpreadInto(index.data(), static_cast<int64_t>(index.size()), 1 / static_cast<double>(group_size),
             of_group, out);
}

void MeetNormal(const float* keys, int64_t n, int64_t width, const float* mean,
                const float* covariance, int64_t heads, float* of_mean, float* of_spread) {
  constexpr int64_t kBlock = KeyBounds::kBlock;
  std::vector<float> by_channel(width * kBlock);
  float met[kBlock];
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t count = std::min(kBlock, n - first);
    for (int64_t i = 0; i < width * kBlock; ++i) {
      const int64_t channel = i / kBlock, key = i % kBlock;
      by_channel[i] = key < count ? keys[(first + key) * width + channel] : 0;
    }
    for (int64_t head = 0; head < heads; ++head) {
      MeetMean(by_channel.data(), width, mean + head * width, met);
      std::copy_n(met, count, of_mean + head * n + first);
      if (covariance == nullptr) continue;
      MeetSpread(by_channel.data(), width, covariance + head * width * width, met);
      std::copy_n(met, count, of_spread + head * n + first);
    }
  }
}

KeyBounds::KeyBounds(int64_t key_width, int64_t sets) : width_(key_width) {
  bounds_.reserve((sets + kBlock - 1) / kBlock * 2 * kBlock * width_);
}

int64_t KeyBounds::Append() {
  if (size_ == stride()) {
    const size_t grown = bounds_.size() + 2 * kBlock * width_;
    bounds_.reserve(grown);  // no more: it is the state that admission counts
    bounds_.resize(grown);
  }
  return size_++;
}

void KeyBounds::Add(const float* key) {
  const int64_t added = Append();
  float* bound = bounds_.data() + At(added);
  for (int64_t channel = 0; channel < width_; ++channel, bound += 2 * kBlock) {
    bound[0] = bound[kBlock] = key[channel];
  }
}

void KeyBounds::AddCopy(const KeyBounds& other, int64_t set) {
  const int64_t added = Append();
  const float* from = other.bounds_.data() + other.At(set);
  float* to = bounds_.data() + At(added);
  for (int64_t i = 0; i < 2 * width_; ++i) to[i * kBlock] = from[i * kBlock];
}

void KeyBounds::Widen(int64_t set, const float* key) {
  float* bound = bounds_.data() + At(set);
  for (int64_t channel = 0; channel < width_; ++channel, bound += 2 * kBlock) {
    const float x = key[channel];
    if (x < bound[0] || x != x) bound[0] = x;
    if (x > bound[kBlock] || x != x) bound[kBlock] = x;
  }
}

std::vector<float> KeyBounds::Most(absl::Span<const float> queries) const {
  const int64_t count = static_cast<int64_t>(queries.size()) / width_;
  std::vector<float> most((count + kTile - 1) / kTile * kTile * stride());
  std::vector<float> up(width_ * kTile), down(width_ * kTile);
  for (int64_t first = 0; first < count; first += kTile) {
    for (int64_t i = 0; i < kTile * width_; ++i) {
      const int64_t channel = i / kTile, query = first + i % kTile;
      const float x = query < count ? queries[query * width_ + channel] : 0;
      up[i] = x < 0 ? 0 : x;
      down[i] = x < 0 ? x : 0;
    }
    MostOfTile(bounds_.data(), stride() / kBlock, width_, up.data(), down.data(),
               most.data() + first * stride());
  }
  return most;
}

EPIKV_CLONES void Affine(const float* weight, const float* bias, const float* x, int64_t out,
                         int64_t in, float* y) {
  for (int64_t row = 0; row < out; ++row, weight += in) {
    float sum = bias[row];
    for (int64_t i = 0; i < in; ++i) sum += weight[i] * x[i];
    y[row] = sum;
  }
}

}  // namespace epikv
