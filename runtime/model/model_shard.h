#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_map>

#include "absl/status/status.h"
#include "runtime/model/manifest.h"

namespace torch::jit {
struct Graph;
}

namespace epikv {

class Ranks;

// This rank's parts of the weights that were split, by the addresses of the whole ones.
using Shards = std::unordered_map<const void*, at::Tensor>;

// Cuts a rank's shard out of a model's frozen graph, as Megatron-LM does (1909.08053, section 3): a
// part of every layer's KV heads with their query heads, of the feed-forward channels, and of the
// vocabulary in embedding and head. What all ranks hold, such as norms and residuals, has the same
// bits in each: where a split product ends the ranks' shares are summed (epikv::sum_ranks), and the
// logits are put together (epikv::gather_ranks). `manifest` becomes that of the shard; all
// constants are the graph's own from then on. FAILED_PRECONDITION: the model cannot be split into
// so many parts, and why.
absl::Status CutShard(torch::jit::Graph& graph, const Ranks& ranks, Manifest& manifest,
                      Shards& shards);

}  // namespace epikv
