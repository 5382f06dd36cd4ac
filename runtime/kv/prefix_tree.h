#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/hash/hash.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace epikv {

// Which prefixes of prompts are known: a tree of blocks of `block_tokens` tokens each. Prefixes
// under different salts have nothing in common. Without torch; one thread.
class PrefixTree {
 public:
  using Block = int64_t;  // >= 0, never given twice
  static constexpr Block kNone = -1;

  explicit PrefixTree(int64_t block_tokens) : block_tokens_(block_tokens) {}

  int64_t block_tokens() const { return block_tokens_; }
  int64_t size() const { return static_cast<int64_t>(nodes_.size()); }
  bool Contains(Block block) const { return nodes_.contains(block); }

  // The blocks of the longest known prefix of `tokens`, in order; they count as used now.
  std::vector<Block> Match(absl::string_view salt, absl::Span<const int32_t> tokens);

  // The block that continues `parent` (kNone: begins a prompt) with these block_tokens tokens.
  std::optional<Block> Find(Block parent, absl::string_view salt,
                            absl::Span<const int32_t> tokens) const;
  // Requires: it is not known, and its parent is. If it throws, nothing has changed.
  Block Add(Block parent, absl::string_view salt, absl::Span<const int32_t> tokens);

  // Of the blocks that none continues the one whose last use is longest ago.
  std::optional<Block> Oldest() const;
  // Requires: none continues it. If it throws, nothing has changed.
  void Remove(Block block);

 private:
  // The parent's prefix is a part of the key, and so is the salt.
  struct Key {
    Block parent = kNone;
    std::string salt;  // where there is no parent
    std::vector<int32_t> tokens;
    bool operator==(const Key&) const = default;
    template <typename H>
    friend H AbslHashValue(H h, const Key& key) {
      return H::combine(std::move(h), key.parent, key.salt, key.tokens);
    }
  };
  struct Node {
    Key key;
    int64_t children = 0;
    int64_t used = 0;  // when, in uses of any block
  };
  static Key KeyOf(Block parent, absl::string_view salt, absl::Span<const int32_t> tokens);
  void Use(Block block, Node& node);

  const int64_t block_tokens_;
  Block next_ = 0;
  int64_t uses_ = 0;
  std::unordered_map<Key, Block, absl::Hash<Key>> blocks_;  // absl's break when memory runs out
  std::unordered_map<Block, Node> nodes_;
  std::set<std::pair<int64_t, Block>> leaves_;  // by last use
};

}  // namespace epikv
