#include "runtime/text/tokenizer/trie.h"

#include <queue>

namespace epikv {
namespace {

// Entries whose strings begin alike, up to `depth`: the subtree of one node.
struct Subtree {
  uint32_t node;
  size_t depth;
  size_t begin, end;  // of the sorted entries
};

}  // namespace

Trie::Trie(std::vector<Entry> entries) {
  std::sort(entries.begin(), entries.end());
  nodes_.push_back({});
  labels_.push_back(0);
  std::queue<Subtree> queue;
  queue.push({kRoot, 0, 0, entries.size()});
  while (!queue.empty()) {  // level by level, so that children lie side by side
    auto [node, depth, begin, end] = queue.front();
    queue.pop();
    if (begin < end && entries[begin].first.size() == depth) {
      nodes_[node].value = entries[begin++].second;
    }
    nodes_[node].first_child = static_cast<uint32_t>(nodes_.size());
    while (begin < end) {
      const char label = entries[begin].first[depth];
      size_t next = begin;
      while (next < end && entries[next].first[depth] == label) ++next;
      const auto child = static_cast<uint32_t>(nodes_.size());
      if (node == kRoot) first_[static_cast<uint8_t>(label)] = child;
      ++nodes_[node].num_children;
      nodes_.push_back({});
      labels_.push_back(static_cast<uint8_t>(label));
      queue.push({child, depth + 1, begin, next});
      begin = next;
    }
  }
}

}  // namespace epikv
