#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "policies/policy.h"

// What policies have in common that rank tokens by the attention of the newest query: pushed in
// decode, made of the last prompt token's query once the prompt is whole.

namespace epikv {

// What a policy declares for it, beside a window of 1.
inline constexpr SignalSet kNewestAttention =
    Signal::kAttentionRow | Signal::kKeys | Signal::kQueries;

// Whether a step's newest query saw what the next round ranks: not within a prompt.
bool EndsInQuery(const SequenceStep& step);

// What that query gave each slot of a lane, averaged over the query heads of its group. fp32
// [used], valid during the step.
at::Tensor NewestAttention(const SequenceStep& step, int64_t layer, int64_t head);

}  // namespace epikv
