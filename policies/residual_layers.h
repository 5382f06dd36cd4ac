#pragma once

#include <cstdint>

#include "policies/frozen_policy.h"
#include "policies/spec.h"

// The parameters that say which residual steps a policy of the EpiKV family compares: `layer_a`,
// `layer_b`, `sign` and `window`.

namespace epikv {

ParamSpec LayerAParam();
ParamSpec LayerBParam();
ParamSpec SignParam();
ParamSpec StepWindowParam();

// Block at `depth` of the model: a published block of 32 is at (block + 1) / 32.
int64_t BlockAtDepth(double depth, int64_t num_layers);

// An error if `param` names a block that the model does not have.
absl::Status CheckBlock(const Params& params, absl::string_view param, const ModelShape& shape);

// Fills the four parameters from the model's calibration of `policy`, else from the published
// depths, sign and window; checks them.
absl::Status CompleteResidualLayers(absl::string_view policy, Params& params,
                                    const ModelShape& shape);

// False if the four parameters are those of the calibration.
bool Uncalibrated(absl::string_view policy, const Params& params, const ModelShape& shape);

// Of PolicyTraits: layer_a and layer_b, ascending.
std::vector<int64_t> ResidualLayers(const Params& params);

// Reads the residual steps of a decode token at layer_a and layer_b.
class StepPair {
 public:
  explicit StepPair(const Params& params)
      : a_(params.Int("layer_a") < params.Int("layer_b") ? 0 : 1) {}
  float a(const SequenceStep& step) const { return step.signals.residual_step[a_]; }
  float b(const SequenceStep& step) const { return step.signals.residual_step[1 - a_]; }

 private:
  int64_t a_;  // place of layer_a in residual_step
};

// EpiKV-Flat's score (epikv/flat_score.h).
FrozenPolicy::Scorer FlatScorer(const Params& params);

}  // namespace epikv
