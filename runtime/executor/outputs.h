#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "runtime/sampling/sampler.h"
#include "runtime/step/step_item.h"

// What a forward's logits become: output tokens and logprobs. Any thread; nothing is committed.

namespace epikv {

// Fills in StepItem::outputs of all items, several at a time: tokens that are sampled, or forced.
// INTERNAL: see sampler.h. What sampling throws is the item's own, too.
void TakeOutputs(absl::Span<StepItem> items);

// Of the prompt tokens that an item's rows predict. INTERNAL: see sampler.h.
absl::StatusOr<PromptLogprobs> TakePromptLogprobs(const StepItem& item);

}  // namespace epikv
