#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

// A conversation's episodes: what of it is about the same (EpiCache, arXiv 2509.17396,
// section 3.2). Pure.

namespace epikv {

using Embedding = std::vector<float>;  // of length 1

struct Episode {
  Embedding centroid;            // the mean of its windows': shorter than 1
  std::vector<int64_t> windows;  // by place in the conversation, nearest to the centroid first
};

// Windows by k-means: `count` episodes, or as many as there are windows. The best of ten tries, by
// k-means++; the same for the same windows.
std::vector<Episode> EpisodesOf(absl::Span<const Embedding> windows, int64_t count);

// The episode whose centroid has the largest product with a question's embedding; the first of
// several. Requires: some.
int64_t NearestEpisode(absl::Span<const Embedding> centroids, const Embedding& question);

}  // namespace epikv
