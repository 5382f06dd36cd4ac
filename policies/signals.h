#pragma once

#include <cstdint>

#include "absl/types/span.h"

namespace epikv {

// What the runtime measured of one sequence during one step, if its policy declared it.
struct Signals {
  // Signal::kResidualStep: |h^l_t - h^l_{t-1}|_2 of the one new token, fp32, in the order of
  // PolicyTraits::residual_layers. h^l is the residual stream after block l. Empty in prefill.
  absl::Span<const float> residual_step;

  // Signal::kResidual: h^l of the one new token, fp32, one row of [hidden_size] for each of
  // PolicyTraits::residual_layers. Empty in prefill.
  absl::Span<const absl::Span<const float>> residual;

  // Signal::kLogitEntropy: of each new token, the entropy, in nats, of the distribution over the
  // next token, its kEntropyTokens most likely ones brought to a sum of 1. [count]
  static constexpr int64_t kEntropyTokens = 256;
  absl::Span<const float> logit_entropy;

  // Signal::kResidualDistance: of each new token, 1 - cos(h^l, h^L), h^l being the residual stream
  // after block l and h^L that after the last. [layers, count]
  absl::Span<const float> residual_distance;

  // Signal::kGate: what Policy::gate() says of each new token. [layers, count, kv_heads, numbers]
  absl::Span<const float> gate;

  // Signal::kFinalHidden: of each new token, the residual stream after the last block as the
  // model's final norm leaves it, fp32. [count, hidden_size]
  absl::Span<const float> final_hidden;

  // Signal::kAttentionRow, in decode: probabilities the new query gave each slot of a lane,
  // averaged over the query heads of its group, recomputed in fp32. Signal::kPromptAttention, in
  // prefill: the same, summed over the queries of the tokens that were just cached. Else null.
  class AttentionRow {
   public:
    virtual ~AttentionRow() = default;
    // layer: of PolicyTraits::attention_layers; throws for any other.
    virtual absl::Span<const float> at(int64_t layer, int64_t head) const = 0;  // [used]
  };
  const AttentionRow* attention = nullptr;
};

}  // namespace epikv
