#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "policies/spec.h"

// What each KV head of a model is for, measured once (`epikv calibrate headkv`), and budgets that
// follow from it. Without torch.

namespace epikv {

// How much of what the model says each KV head looks up far back: >= 0, and not 0 for all. Only
// their proportions count. [layers x kv_heads], heads inner
struct HeadProfile final : PolicyData {
  std::vector<double> scores;
};

// PolicySpec::read_data of {"scores": [layers][kv_heads]}.
absl::StatusOr<std::shared_ptr<const PolicyData>> ReadHeadProfile(const ArtefactData& artefact,
                                                                  const ModelShape& shape);

// The policy's; null if none was loaded.
const HeadProfile* FindHeadProfile(absl::string_view policy, const ModelShape& shape);

// Budgets whose sum is `budget` for each lane: `least`, and of the rest what is in proportion to
// the lane's weight. weights: >= 0, not 0 for all. least: `budget` at most.
std::vector<int64_t> BudgetsByWeight(absl::Span<const double> weights, int64_t least,
                                     int64_t budget);

}  // namespace epikv
