#include "runtime/prefix_tree.h"

#include "absl/base/internal/raw_logging.h"

namespace epikv {

PrefixTree::Key PrefixTree::KeyOf(Block parent, absl::string_view salt,
                                  absl::Span<const int32_t> tokens) {
  return {.parent = parent,
          .salt = parent == kNone ? std::string(salt) : "",
          .tokens = {tokens.begin(), tokens.end()}};
}

void PrefixTree::Use(Block block, Node& node) {
  if (node.children == 0) leaves_.erase({node.used, block});
  node.used = ++uses_;
  if (node.children == 0) leaves_.insert({node.used, block});
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
  const Key key = KeyOf(parent, salt, tokens);
  ABSL_RAW_CHECK(static_cast<int64_t>(tokens.size()) == block_tokens_ && !blocks_.contains(key),
                 "a block is as long as all others, and added once");
  if (parent != kNone) {
    Node& above = nodes_.at(parent);
    if (above.children++ == 0) leaves_.erase({above.used, parent});
  }
  const Block block = next_++;
  blocks_.emplace(key, block);
  Node& node = nodes_[block] = {.key = key};
  Use(block, node);
  return block;
}

std::optional<PrefixTree::Block> PrefixTree::Oldest() const {
  if (leaves_.empty()) return std::nullopt;
  return leaves_.begin()->second;
}

void PrefixTree::Remove(Block block) {
  const auto found = nodes_.find(block);
  ABSL_RAW_CHECK(found != nodes_.end() && found->second.children == 0,
                 "a block goes after those that continue it");
  const Node node = std::move(found->second);
  nodes_.erase(found);
  leaves_.erase({node.used, block});
  blocks_.erase(node.key);
  if (node.key.parent == kNone) return;
  Node& above = nodes_.at(node.key.parent);
  if (--above.children == 0) leaves_.insert({above.used, node.key.parent});
}

}  // namespace epikv
