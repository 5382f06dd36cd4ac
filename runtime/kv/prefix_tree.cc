#include "runtime/kv/prefix_tree.h"

#include <utility>

#include "runtime/base/require.h"

namespace epikv {

PrefixTree::Key PrefixTree::KeyOf(Block parent, absl::string_view salt,
                                  absl::Span<const int32_t> tokens) {
  return {.parent = parent,
          .salt = parent == kNone ? std::string(salt) : "",
          .tokens = {tokens.begin(), tokens.end()}};
}

void PrefixTree::Use(Block block, Node& node) {
  auto leaf = leaves_.extract({node.used, block});
  node.used = ++uses_;
  if (leaf.empty()) return;
  leaf.value().first = node.used;
  leaves_.insert(std::move(leaf));
}

std::vector<PrefixTree::Block> PrefixTree::Match(absl::string_view salt,
                                                 absl::Span<const int32_t> tokens) {
  std::vector<Block> path;
  Block last = kNone;
  for (; static_cast<int64_t>(tokens.size()) >= block_tokens_;
       tokens.remove_prefix(block_tokens_)) {
    const std::optional<Block> next = Find(last, salt, tokens.first(block_tokens_));
    if (!next.has_value()) break;
    last = *next;
    Use(last, nodes_.at(last));
    path.push_back(last);
  }
  return path;
}

std::optional<PrefixTree::Block> PrefixTree::Find(Block parent, absl::string_view salt,
                                                  absl::Span<const int32_t> tokens) const {
  const auto found = blocks_.find(KeyOf(parent, salt, tokens));
  if (found == blocks_.end()) return std::nullopt;
  return found->second;
}

PrefixTree::Block PrefixTree::Add(Block parent, absl::string_view salt,
                                  absl::Span<const int32_t> tokens) {
  Key key = KeyOf(parent, salt, tokens);
  Require(static_cast<int64_t>(tokens.size()) == block_tokens_ && !blocks_.contains(key),
          "a block is as long as all others, and added once");
  Require(parent == kNone || nodes_.contains(parent), "a block continues one that is known");
  const Block block = next_;
  const int64_t used = uses_ + 1;
  const auto leaf = leaves_.emplace(used, block).first;
  try {
    blocks_.emplace(key, block);
    nodes_.emplace(block, Node{.key = key, .used = used});
  } catch (...) {
    leaves_.erase(leaf);
    blocks_.erase(key);
    throw;
  }
  next_ = block + 1;
  uses_ = used;
  if (parent != kNone) {
    Node& above = nodes_.at(parent);
    if (above.children++ == 0) leaves_.erase({above.used, parent});
  }
  return block;
}

std::optional<PrefixTree::Block> PrefixTree::Oldest() const {
  if (leaves_.empty()) return std::nullopt;
  return leaves_.begin()->second;
}

void PrefixTree::Remove(Block block) {
  const auto found = nodes_.find(block);
  Require(found != nodes_.end() && found->second.children == 0,
          "a block goes after those that continue it");
  const Key& key = found->second.key;
  if (key.parent != kNone) {
    Node& above = nodes_.at(key.parent);
    if (above.children == 1) leaves_.insert({above.used, key.parent});
    --above.children;
  }
  leaves_.erase({found->second.used, block});
  blocks_.erase(key);
  nodes_.erase(found);
}

}  // namespace epikv
