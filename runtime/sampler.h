#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

// Picks a token from one row of logits. Pure functions, any thread.
//
// Of every function: `logits` is [vocab], not empty. -inf is a token that cannot be; a NaN, a +inf
// or nothing but -inf is a broken forward and gives INTERNAL, naming the token.

namespace epikv {

// How a request's tokens are drawn. Admission has checked the ranges given here.
struct SamplingParams {
  std::optional<float> temperature;  // finite, >= 0; absent or 0: greedy
  std::optional<float> top_p;        // in (0, 1]; absent: 1
  std::optional<int32_t> top_k;      // >= 0; absent or 0: all
  uint64_t seed = 0;

  bool greedy() const { return temperature.value_or(0) == 0; }
};

// The token with the highest logit, of several the lowest.
absl::StatusOr<int32_t> Argmax(absl::Span<const float> logits);

// The request's `draw_index`-th token, from 0. Greedy: the Argmax. Otherwise drawn from the softmax
// of logits / temperature, over the top_k likeliest tokens, and of those over the smallest set with
// a share of at least top_p (of tokens as likely as each other the lower goes first). Depends on
// the arguments alone: the same seed gives the same text in any batch.
absl::StatusOr<int32_t> Sample(absl::Span<const float> logits, const SamplingParams& params,
                               uint64_t draw_index);

// Natural logarithm of the token's softmax over the raw logits: before temperature, top_k and
// top_p. Precondition: 0 <= token < vocab.
absl::StatusOr<float> LogProb(absl::Span<const float> logits, int32_t token);

}  // namespace epikv
