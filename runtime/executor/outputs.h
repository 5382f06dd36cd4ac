#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "runtime/sampling/sampler.h"
#include "runtime/step/step_item.h"

// What a forward's logits become: output tokens and logprobs. Any thread; nothing is committed.

namespace epikv {

// The i-th output token that an item gives: sampled, or forced. INTERNAL: see sampler.h.
absl::StatusOr<OutputToken> TakeOutput(const StepItem& item, int64_t i,
                                       const SamplingParams& sampling);

// Of the prompt tokens that an item's rows predict. INTERNAL: see sampler.h.
absl::StatusOr<PromptLogprobs> TakePromptLogprobs(const StepItem& item);

}  // namespace epikv
