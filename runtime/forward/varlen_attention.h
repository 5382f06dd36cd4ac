#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace epikv {

// Attention of many sequences in one call, where each sequence is a lane: it reads `length` rows of
// the pool from `start` on, and has a run of queries. A query is one row's group of query heads,
// which share the lane. b: lanes.
struct VarlenCall {
  at::Tensor q;                             // [queries, group, width], contiguous
  at::Tensor keys, values;                  // [rows of the pool, width]
  at::Tensor query_starts;                  // int32 [b + 1]
  at::Tensor starts;                        // int32 [b + 1]; the last is not read
  at::Tensor lengths;                       // int32 [b], each at least the lane's queries
  int64_t max_queries = 0, max_length = 0;  // of a lane
  // The i-th of m queries sees all but the last m - 1 - i rows; else all.
  bool causal = false;
  double scale = 1;
};

// [queries, group, width]. On a CUDA device PyTorch's flash kernel (FlashAttention-2:
// aten::_flash_attention_forward; `starts` are its cum_seq_k, `lengths` its seqused_k, which is
// what it bounds reads and the causal mask by); float16 or bfloat16, width a multiple of 8 up to
// 256, compute capability 8.0. With one query a lane it splits long lanes over processors. On the
// CPU a plain loop over the same arguments, for tests.
at::Tensor VarlenAttention(const VarlenCall& call);

// What queries q [m, heads x group, width] give each of `used` slots of the lanes that lie one
// after another from row `first` of `keys`, `capacity` rows each: probabilities in fp32, summed
// over the queries and averaged over the group. Causal as above. [heads, used]
at::Tensor AttentionMass(const at::Tensor& q, const at::Tensor& keys, int64_t first, int64_t heads,
                         int64_t capacity, int64_t used, double scale);

// The same of one query a lane, for lanes anywhere in `keys`. queries fp32 [b, group, width],
// times the scale; starts,
// lengths int64 [b]: a lane's first row, and how many of its rows are read; longest: of them. [b,
// longest], 0 behind a lane's end.
at::Tensor LaneMasses(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& starts,
                      const at::Tensor& lengths, int64_t longest);

// Lanes whose masses are made at once, where the longest is so long: keys are widened to fp32.
int64_t LanesAtOnce(int64_t longest, int64_t width);

}  // namespace epikv
