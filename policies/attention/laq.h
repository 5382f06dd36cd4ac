#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "policies/lookahead.h"
#include "policies/scored_policy.h"
#include "policies/window_score.h"

// LAQ and LAQ++ (arXiv 2505.20334): SnapKV's score of a prompt, by the queries of tokens told ahead
// and, of LAQ++, of the prompt's newest. Decoded tokens are ranked as snapkv ranks them.

namespace epikv {

ParamSpec LaqCompatParam();

class Laq final : public ScoredPolicy {
 public:
  // prompt_queries: of the newest, beside those told ahead; so many tokens stay.
  Laq(const Params& params, int64_t prompt_queries)
      : ScoredPolicy(Granularity::kHead), params_(params), prompt_queries_(prompt_queries) {}

  static absl::Status Complete(Params& params);
  static PolicyTraits Traits(const Params& params, int64_t prompt_queries);

  Eviction Draft(const EvictionTask& task) const override { return DraftOf(task, params_); }

 private:
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override;

  const Params params_;
  const int64_t prompt_queries_;
};

}  // namespace epikv
