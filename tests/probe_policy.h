#pragma once

#include <vector>

#include "policies/cache_view.h"
#include "policies/spec.h"

namespace epikv {

// Evicts by chance in every lane, and fails a request for which one signal contradicts another: the
// attention that is pushed must be what the pulled queries give over the pulled keys, and rows of
// slots those of their lanes.
extern const PolicySpec kProbePolicy;

constexpr int64_t kProbedBlock = 1;

// What it was given of one sequence, token by token.
struct ProbeRecord {
  std::vector<float> logit_entropy;
  std::vector<std::vector<float>> residual_distance;  // [tokens][layers]
  std::vector<std::vector<float>> residual;           // [decode tokens][hidden], after kProbedBlock
  std::vector<CacheView::QueryMoments> moments;       // after the last token, by layer
  struct Positions {
    int64_t newest = 0, cached = 0;  // index of the newest token; tokens in the last lane
    int64_t next = 0;                // RoPE position there
  };
  std::vector<Positions> positions;  // after each step
};
// From here on, until it is given null.
void RecordProbe(ProbeRecord* record);

}  // namespace epikv
