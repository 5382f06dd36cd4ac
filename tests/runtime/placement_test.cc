#include "runtime/ranks/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace epikv {
namespace placement_test {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(Placement, ReadsListsOfCpus) {
  EXPECT_THAT(CpusOfList("0-3,8"), ElementsAre(0, 1, 2, 3, 8));
  EXPECT_THAT(CpusOfList("5\n"), ElementsAre(5));
  EXPECT_THAT(CpusOfList(""), IsEmpty());
  for (const char* wrong : {"a", "1-", "1-2-3", "-1", "0-99999999", "3,x"}) {
    EXPECT_THAT(CpusOfList(wrong), IsEmpty()) << wrong;
  }
}

TEST(Placement, RanksShareOutTheNodes) {
  const std::vector<std::vector<int>> nodes = {{0, 1}, {2, 3}, {4, 5}, {6, 7}};
  const std::vector<int> all = {0, 1, 2, 3, 4, 5, 6, 7};
  EXPECT_THAT(CpusOfRank(nodes, all, 0, 2), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(CpusOfRank(nodes, all, 1, 2), ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(CpusOfRank(nodes, all, 3, 4), ElementsAre(6, 7));
  EXPECT_THAT(CpusOfRank(nodes, all, 1, 3), ElementsAre(2, 3));
  EXPECT_THAT(CpusOfRank(nodes, all, 2, 3), ElementsAre(4, 5, 6, 7));
}

TEST(Placement, OnlyWhereItMayRun) {
  const std::vector<std::vector<int>> nodes = {{0, 1}, {2, 3}};
  EXPECT_THAT(CpusOfRank(nodes, {1, 2}, 0, 2), ElementsAre(1));
  EXPECT_THAT(CpusOfRank(nodes, {0, 1}, 1, 2), IsEmpty()) << "its node is not ours: anywhere";
  EXPECT_THAT(CpusOfRank({{0, 1, 2, 3}}, {0, 1}, 1, 2), IsEmpty()) << "one node: anywhere";
}

}  // namespace placement_test
}  // namespace epikv
