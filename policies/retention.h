#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "policies/mlp_gate.h"
#include "policies/scored_policy.h"
#include "policies/spec.h"

// Policies whose gate says at a token's birth how fast each head will forget it: the share beta of
// its worth that a step leaves (TRIM-KV, arXiv 2512.03324; DBTrimKV, arXiv 2605.09649).

namespace epikv {

ParamSpec LookaheadParam();  // `lookahead`: steps whose worth counts

// The policy's data: a gate of `depth` linear maps, whose logits are those of beta.
absl::StatusOr<std::shared_ptr<const PolicyData>> ReadRetentionGate(const ArtefactData& artefact,
                                                                    const ModelShape& shape,
                                                                    int64_t depth);

// What both declare: nothing is protected, and a prompt is ranked chunk by chunk.
PolicyTraits RetentionTraits(const Params& params);

std::shared_ptr<const Policy> MakeRetentionPolicy(const Params& params, Recipe recipe,
                                                  std::shared_ptr<const PolicyData> gate);

}  // namespace epikv
