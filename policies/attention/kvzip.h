#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "policies/gate.h"
#include "policies/recipe.h"
#include "policies/scored_policy.h"

// KVzip and KVzip+ (arXiv 2505.23416; kvpress): the model is made to repeat the prompt, and a token
// is worth the most that any query of the repetition gave it.

namespace epikv {

ParamSpec RepeatChunkParam();

class Kvzip final : public ScoredPolicy {
 public:
  // weighs: KVzip+, attention times |v W_O| over the length of what the asking token's layer is
  // given.
  Kvzip(const Params& params, const ModelShape& shape, bool weighs);

  static absl::Status Complete(Params& params);
  static PolicyTraits Traits(const Params& params, const ModelShape& shape, bool weighs);

  const Gate* gate() const override { return gate_.get(); }
  std::vector<std::vector<int32_t>> PassSegments(absl::Span<const int32_t> prompt) const override;
  void ObservePass(absl::Span<PassStep> steps) const override;

 private:
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override;
  void ObserveLane(PassStep& step, int64_t layer, int64_t head) const;

  const int64_t chunk_;
  const ModelShape::RepeatPhrases phrases_;
  const std::unique_ptr<const Gate> gate_;  // null: attention is not weighed
};

}  // namespace epikv
