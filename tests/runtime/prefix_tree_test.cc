#include "runtime/kv/prefix_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <vector>

namespace epikv {
namespace prefix_tree_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Block = PrefixTree::Block;

constexpr Block kNone = PrefixTree::kNone;

TEST(PrefixTreeTest, FindsTheLongestPrefixInWholeBlocks) {
  PrefixTree tree(2);
  const Block a = tree.Add(kNone, "", {1, 2});
  const Block b = tree.Add(a, "", {3, 4});
  const Block c = tree.Add(a, "", {3, 5});
  EXPECT_THAT(tree.Match("", {1, 2, 3, 4, 5, 6}), ElementsAre(a, b));
  EXPECT_THAT(tree.Match("", {1, 2, 3, 5}), ElementsAre(a, c));
  EXPECT_THAT(tree.Match("", {1, 2, 3}), ElementsAre(a)) << "half a block is none";
  EXPECT_THAT(tree.Match("", {1}), IsEmpty());
  EXPECT_THAT(tree.Match("", {3, 4}), IsEmpty()) << "not where a prompt begins";
}

TEST(PrefixTreeTest, SaltsShareNothing) {
  PrefixTree tree(1);
  const Block a = tree.Add(kNone, "", {1});
  const Block b = tree.Add(kNone, "pepper", {1});
  EXPECT_NE(a, b);
  EXPECT_THAT(tree.Match("pepper", {1, 2}), ElementsAre(b));
  EXPECT_THAT(tree.Match("sugar", {1, 2}), IsEmpty());
}

TEST(PrefixTreeTest, TheOldestLeafGoesFirst) {
  PrefixTree tree(1);
  EXPECT_EQ(tree.Oldest(), std::nullopt);
  const Block a = tree.Add(kNone, "", {1});
  const Block b = tree.Add(a, "", {2});
  const Block c = tree.Add(a, "", {3});
  EXPECT_EQ(tree.Oldest(), b);
  tree.Match("", {1, 2});
  EXPECT_EQ(tree.Oldest(), c) << "b was used since";
  tree.Remove(c);
  EXPECT_EQ(tree.Oldest(), b) << "a is continued";
  tree.Remove(b);
  EXPECT_EQ(tree.Oldest(), a);
  tree.Remove(a);
  EXPECT_EQ(tree.size(), 0);
  EXPECT_NE(tree.Add(kNone, "", {1}), a) << "what a sequence remembers is never another block";
}

// Against the definition: a set of prefixes, each with the time of its last use.
TEST(PrefixTreeTest, EqualsASetOfPrefixes) {
  std::mt19937_64 rng(7);
  PrefixTree tree(2);
  struct Known {
    Block block;
    int64_t used;
  };
  std::map<std::vector<int32_t>, Known> known;
  int64_t uses = 0;
  for (int round = 0; round < 20000; ++round) {
    std::vector<int32_t> prompt;
    for (uint64_t i = 0; i < 1 + rng() % 9; ++i) prompt.push_back(static_cast<int32_t>(rng() % 2));
    std::vector<Block> expected;
    std::vector<int32_t> prefix;
    for (size_t end = 2; end <= prompt.size(); end += 2) {
      const std::vector<int32_t> longer(prompt.begin(), prompt.begin() + end);
      const auto found = known.find(longer);
      if (found == known.end()) break;
      found->second.used = ++uses;
      expected.push_back(found->second.block);
      prefix = longer;
    }
    ASSERT_EQ(tree.Match("", prompt), expected);
    if (rng() % 3 > 0 && prompt.size() >= prefix.size() + 2) {
      const std::vector<int32_t> longer(prompt.begin(), prompt.begin() + prefix.size() + 2);
      const Block block = tree.Add(expected.empty() ? kNone : expected.back(), "",
                                   {longer[longer.size() - 2], longer.back()});
      known[longer] = {block, ++uses};
    } else if (!known.empty()) {
      const auto continued = [&](const std::vector<int32_t>& of) {
        for (const auto& [other, k] : known) {
          if (other.size() == of.size() + 2 && std::equal(of.begin(), of.end(), other.begin())) {
            return true;
          }
        }
        return false;
      };
      auto oldest = known.end();
      for (auto it = known.begin(); it != known.end(); ++it) {
        if (continued(it->first)) continue;
        if (oldest == known.end() || it->second.used < oldest->second.used) oldest = it;
      }
      ASSERT_EQ(tree.Oldest(), oldest->second.block);
      tree.Remove(oldest->second.block);
      known.erase(oldest);
    }
    ASSERT_EQ(tree.size(), static_cast<int64_t>(known.size()));
  }
}

}  // namespace prefix_tree_test
}  // namespace epikv
