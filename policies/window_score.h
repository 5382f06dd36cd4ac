#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "policies/lane.h"
#include "policies/spec.h"

// What policies that look at the attention of the newest w queries have in common.

namespace epikv {

ParamSpec WindowParam(int64_t fallback);
ParamSpec PoolKernelParam(int64_t fallback);          // `kernel`: odd; 1: no pooling
ParamSpec PoolModeParam(absl::string_view fallback);  // `pooling`: avg or max
ParamSpec GqaParam(absl::string_view fallback);       // `gqa`: mean, max or sum

// An even kernel has no middle.
absl::Status CheckWindow(const Params& params);

// PolicyTraits::floats_per_token of a query whose logits a round holds: with its attention, and
// what is made of both.
constexpr int64_t kFloatsOfQuery = 5;

// Of a policy that scores lanes by what its window sees: a prompt is cached whole and then ranked,
// the window stays. more: signals beside keys and queries.
PolicyTraits WindowTraits(const Params& params, SignalSet more = {});

// Over the query heads of a KV head. [group, ...] -> [...]
at::Tensor ReduceGroup(const at::Tensor& x, const std::string& mode);

// Over neighbours in birth order, stride 1, as long as before. [..., n]. avg counts the zeros
// beyond the ends, as the published code does.
at::Tensor PoolNeighbours(const at::Tensor& x, int64_t kernel, const std::string& mode);

// Of the tokens before the window, in birth order: [..., n] by slot -> [..., before].
at::Tensor BeforeWindow(Lane& lane, const at::Tensor& x);

// The scores of a lane's oldest tokens, those before a window, in birth order, as those of all [n],
// by slot. Tokens of the window get the highest score of the others.
at::Tensor WithWindow(Lane& lane, const at::Tensor& score);

// Scores of a lane from those of its query heads, `by_head` [group, n] by slot: of the tokens
// before the window, pooled over neighbours per query head, reduced over the group; WithWindow.
// fp32 [n] by slot.
at::Tensor ScoreBeforeWindow(Lane& lane, const at::Tensor& by_head, const Params& params);

// The same of what a window gives the tokens before it, averaged over its queries: attention
// [group, w, n] by slot.
at::Tensor WindowScore(Lane& lane, const at::Tensor& attention, const Params& params);

}  // namespace epikv
