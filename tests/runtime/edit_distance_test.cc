#include "runtime/text/edit_distance.h"

#include <gtest/gtest.h>

#include <string>

namespace epikv {
namespace edit_distance_test {

TEST(EditDistanceTest, CountsInsertedDeletedAndReplacedBytes) {
  EXPECT_EQ(EditDistance("", ""), 0u);
  EXPECT_EQ(EditDistance("", "abc"), 3u);
  EXPECT_EQ(EditDistance("abc", ""), 3u);
  EXPECT_EQ(EditDistance("slidng", "sliding"), 1u);
  EXPECT_EQ(EditDistance("windwo", "window"), 2u);
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3u);
}

TEST(EditDistanceTest, LongerNamesMayHaveMoreEdits) {
  EXPECT_TRUE(IsClose("h20", "h2o"));
  EXPECT_FALSE(IsClose("hzz", "h2o"));
  EXPECT_TRUE(IsClose("epikv_flt", "epikv_flat"));
  EXPECT_FALSE(IsClose("epikv_zzzz", "epikv_flat"));
}

TEST(EditDistanceTest, PartOfANameIsCloseToIt) {
  EXPECT_TRUE(IsClose("streaming", "streaming_llm"));
  EXPECT_FALSE(IsClose("ll", "streaming_llm"));
  EXPECT_FALSE(IsClose("", "streaming_llm"));
}

TEST(EditDistanceTest, MuchTooLongIsFarWithoutBeingCompared) {
  EXPECT_FALSE(IsClose(std::string(1 << 20, 'x'), "sliding"));
}

}  // namespace edit_distance_test
}  // namespace epikv
