#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "policies/protection.h"

namespace epikv {

// How a layer turns a query and the keys into attention.
struct AttentionFacts {
  double scale = 1;                // logits are scale x query . key, and then:
  std::optional<double> soft_cap;  // they become cap x tanh(logits / cap)
  std::optional<int64_t> window;   // a query sees as many tokens, itself included; absent: all
};

// One sequence's cache between two steps, as a policy sees it. Owned by the runtime, valid for the
// call it is passed to. A lane is named by (layer, head); lanes that share one keep decision
// (PolicyTraits::granularity) share `index` and the columns. Slots hold tokens in no particular
// order: `index` says which. There are no holes.
class CacheView {
 public:
  virtual ~CacheView() = default;

  virtual int64_t num_layers() const = 0;
  virtual int64_t num_kv_heads() const = 0;
  virtual int64_t num_heads() const = 0;
  virtual int64_t prompt_tokens() const = 0;
  virtual int64_t newest() const = 0;  // index of the newest cached token
  // RoPE position of the next token in this lane: its index, unless the request's positions are
  // others.
  virtual int64_t next_position(int64_t layer, int64_t head) const = 0;
  virtual const Protection& protection() const = 0;
  virtual uint64_t seed() const = 0;  // of the request; for counter-based random numbers
  // Where several ranks serve the model, each has a part of its KV heads: how many lie before these
  // in a layer, and how many a layer has in all.
  virtual int64_t first_kv_head() const { return 0; }
  virtual int64_t all_kv_heads() const { return num_kv_heads(); }
  // Of an average over the heads that are here: makes it one over all ranks' heads, in place.
  // Declared by PolicyTraits::averages_heads.
  virtual void AverageOverRanks(absl::Span<float> mean) const {}

  // Entries that must leave this lane to meet its budget, >= 0. Where lanes share a budget
  // (PolicyTraits::pool): that must leave all of them together.
  virtual int64_t excess(int64_t layer, int64_t head) const = 0;
  // Birth order of the token in each slot. [used], unique.
  virtual absl::Span<const int32_t> index(int64_t layer, int64_t head) const = 0;
  // A declared per-slot column, by its place in PolicyTraits::columns. [used]. 0 for a token just
  // cached.
  virtual absl::Span<float> column(int64_t place, int64_t layer, int64_t head) = 0;
  // K and V rows of one lane, after RoPE, as they are attended over, in the model's dtype; in fp32
  // where they are cached as int8. [used, width]. Pulled lazily; declared by Signal::kKeys and
  // kValues. A token's rows do not change while it is cached, unless the policy itself rounds them:
  // who declares them is refused positions that do.
  virtual at::Tensor keys(int64_t layer, int64_t head) const = 0;
  virtual at::Tensor values(int64_t layer, int64_t head) const = 0;
  // The same of some slots, all of them in use in every lane: a copy of these alone, in fp32.
  // [num_layers, num_kv_heads, slots, width]
  virtual at::Tensor keys_of(absl::Span<const int64_t> slots) const = 0;
  virtual at::Tensor values_of(absl::Span<const int64_t> slots) const = 0;
  // Rounds K and V of one lane's slots, which are one group, to so many bits, in place
  // (rounding.h). Of decoded tokens, in Observe; declared by PolicyTraits::rounds_rows.
  virtual void RoundRows(int64_t layer, int64_t head, absl::Span<const int64_t> slots,
                         int64_t bits) = 0;
  // The queries of the newest tokens as they attended, after RoPE, in the model's dtype, oldest
  // first: the last row is of newest(). [w, num_heads, width], w <= PolicyTraits::window; fewer
  // while fewer tokens have been cached. Declared by Signal::kQueries.
  virtual at::Tensor queries(int64_t layer) const = 0;
  // The queries of the tokens that were told ahead, as if they came behind newest(), oldest first:
  // such a query sees all that is cached, but for a layer's window. [m, num_heads, width], m <=
  // ScratchPass::lookahead; 0 but in the round at a prompt's end.
  virtual at::Tensor lookahead(int64_t layer) const = 0;
  // In a PassStep: keys of a lane's tokens of the segment so far, as `keys` has them. [first +
  // count, width]
  virtual at::Tensor scratch_keys(int64_t layer, int64_t head) const = 0;
  // Tokens that were dropped from this lane and lie in the tier below, in the order in which they
  // went, and their keys, in fp32. [ghosts], [ghosts, width]. Declared by
  // PolicyTraits::recalls.
  virtual std::vector<int32_t> ghosts(int64_t layer, int64_t head) const { return {}; }
  virtual at::Tensor ghost_keys(int64_t layer, int64_t head,
                                absl::Span<const int32_t> ghosts) const {
    return {};
  }
  virtual AttentionFacts attention(int64_t layer) const = 0;
  // Of the queries of all tokens from this one on, before RoPE: the first tokens' are outliers.
  // fp32; the covariance divides by count. Declared by Signal::kQueryMoments.
  static constexpr int64_t kFirstMeasuredQuery = 4;
  struct QueryMoments {
    int64_t count = 0;
    at::Tensor mean;        // [num_heads, key_width]
    at::Tensor covariance;  // [num_heads, key_width, key_width]
  };
  virtual QueryMoments query_moments(int64_t layer) const = 0;
  // W_O of a layer by query head, in the model's dtype: a head's output o adds o W_O[head] to the
  // residual. [num_heads, value_width, hidden]. Made at each call. And W_O[head] W_O[head]^T, so
  // that |v W_O[head]|^2 = v gram[head] v^T. fp32 [num_heads, value_width, value_width]. Declared
  // by Signal::kOutputProjection.
  virtual at::Tensor output_projection(int64_t layer) const = 0;
  virtual at::Tensor output_gram(int64_t layer) const = 0;
};

}  // namespace epikv
