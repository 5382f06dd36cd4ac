#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "policies/lane.h"
#include "policies/spec.h"

// R-KV's score (arXiv 2505.24133): what the newest queries make of a token, against how much its
// key repeats others'. Of `rkv`, and of what builds on it.

namespace epikv {

ParamSpec LambdaParam(double fallback);
ParamSpec RedundancyParam();
ParamSpec RkvCompatParam();

class RkvScore {
 public:
  explicit RkvScore(const Params& params);

  // Of redundancy = exact: the column that it keeps from round to round, the policy's only one, and
  // that it compares all pairs.
  static void AddTraits(const Params& params, PolicyTraits& traits);

  // fp32, by slot, [n]. Tokens of the window get the highest score of the others.
  at::Tensor Of(Lane& lane) const;

 private:
  at::Tensor Similarity(Lane& lane) const;

  const double lambda_;
  const int64_t kernel_;
  const bool exact_, compat_;
};

}  // namespace epikv
