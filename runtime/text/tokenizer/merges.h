#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/types/span.h"

namespace epikv {

// Pairs of neighbouring tokens that become one token, the merges of byte pair encoding. Immutable,
// any thread.
class Merges {
 public:
  using Pair = std::pair<int32_t, int32_t>;
  struct Merge {
    int32_t rank;    // lower goes first
    int32_t result;  // the token the pair becomes
  };
  using Table = absl::flat_hash_map<Pair, Merge>;

  Merges() = default;
  // `initial`: all tokens that text may hold before anything is merged.
  Merges(Table table, absl::Span<const int32_t> initial);

  // Appends to `ids` what is left of `tokens` when the pair whose merge has the lowest rank, the
  // leftmost of several, has been merged until no pair has a merge.
  void Apply(absl::Span<const int32_t> tokens, std::vector<int32_t>& ids) const;

 private:
  // Finds the pairs of tokens between which some merge, of these or of what they have become, can
  // ever reach. Text falls apart between the others, so that long text takes no long queue.
  void FindJoints(absl::Span<const int32_t> initial);
  bool MayJoin(int32_t left, int32_t right) const {
    return !cuts_ || joints_.contains(Pair(left, right));
  }

  const Merge* Find(int32_t left, int32_t right) const;
  // Few tokens are searched for the lowest rank again and again, many are queued.
  void ApplyToFew(absl::Span<const int32_t> tokens, std::vector<int32_t>& ids) const;
  void ApplyToMany(absl::Span<const int32_t> tokens, std::vector<int32_t>& ids) const;

  Table table_;
  bool cuts_ = false;  // joints_ is known
  absl::flat_hash_set<Pair> joints_;
};

}  // namespace epikv
