#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "runtime/sampling/sampler.h"

// How far an arm's next-token distributions lie from those of the full cache.

namespace epikv {

// Over the output tokens of one request.
struct Divergence {
  int64_t tokens = 0;
  int64_t agreed = 0;  // of them, those of which both find the same token likeliest
  double kl_nats = 0;  // the sum of KlNats

  double mean_kl_nats() const { return kl_nats / static_cast<double>(tokens); }
  double agreement() const { return static_cast<double>(agreed) / static_cast<double>(tokens); }
};

// Kullback-Leibler divergence D(full || arm) in nats, of which the likeliest tokens are known, each
// list with natural log-probabilities: over the tokens of both lists one by one, those of the full
// cache's list alone together, and all others together. Of the second the arm's share is not known:
// it is at most what its list leaves, and the one in question that diverges least is taken. So, by
// the data-processing inequality, it is at most the divergence over all tokens, and equal to it
// where the lists hold the vocabulary. Log-probabilities are in float32: what a list leaves to 1 is
// known to 1e-6, and so is the result.
double KlNats(absl::Span<const TokenLogprob> full, absl::Span<const TokenLogprob> arm);

// The same by output token; rows are likeliest first, not empty. Precondition: as many rows.
Divergence Diverge(const std::vector<std::vector<TokenLogprob>>& full,
                   const std::vector<std::vector<TokenLogprob>>& arm);

}  // namespace epikv
