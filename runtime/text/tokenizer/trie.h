#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace epikv {

// Strings and their values, for finding those that text begins with. Immutable, any thread.
class Trie {
 public:
  using Entry = std::pair<std::string, int32_t>;  // the value is at least 0

  // The strings are distinct and not empty.
  explicit Trie(std::vector<Entry> entries);

  // Calls visit(length, value) for each string that `text` begins with, shorter ones first.
  template <typename Visit>
  void ForEachPrefix(absl::string_view text, Visit visit) const {
    if (text.empty()) return;
    uint32_t node = first_[static_cast<uint8_t>(text[0])];
    for (size_t length = 1; node != kRoot; ++length) {
      if (nodes_[node].value >= 0) visit(length, nodes_[node].value);
      if (length == text.size()) return;
      node = Child(node, static_cast<uint8_t>(text[length]));
    }
  }

  // Whether some string begins with the byte.
  bool MayBegin(char byte) const { return first_[static_cast<uint8_t>(byte)] != kRoot; }

 private:
  static constexpr uint32_t kRoot = 0;  // no node's child

  struct Node {
    uint32_t first_child = 0;  // children lie side by side, by label
    uint16_t num_children = 0;
    int32_t value = -1;  // negative: no string ends here
  };

  // kRoot if there is none.
  uint32_t Child(uint32_t parent, uint8_t label) const {
    const auto begin = labels_.begin() + nodes_[parent].first_child;
    const auto end = begin + nodes_[parent].num_children;
    const auto found = std::lower_bound(begin, end, label);
    if (found == end || *found != label) return kRoot;
    return static_cast<uint32_t>(found - labels_.begin());
  }

  std::vector<Node> nodes_;
  std::vector<uint8_t> labels_;           // [nodes]: of the edge to each node
  std::array<uint32_t, 256> first_ = {};  // the root's children, by label
};

}  // namespace epikv
