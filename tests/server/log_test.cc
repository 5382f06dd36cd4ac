#include "server/base/log.h"

#include <gtest/gtest.h>

#include <optional>

namespace epikv {
namespace {

TEST(LineLimitTest, KeepsBackWhatIsTooMuchInASecondAndSaysSo) {
  LineLimit limit(2);
  const absl::Time start = absl::UnixEpoch();
  EXPECT_EQ(limit.Take(start), 0);
  EXPECT_EQ(limit.Take(start), 0);
  EXPECT_EQ(limit.Take(start), std::nullopt);
  EXPECT_EQ(limit.Take(start + absl::Milliseconds(999)), std::nullopt);
  EXPECT_EQ(limit.Take(start + absl::Seconds(1)), 2);
  EXPECT_EQ(limit.Take(start + absl::Seconds(1)), 0);
  EXPECT_EQ(limit.Take(start + absl::Seconds(1)), std::nullopt);
  EXPECT_EQ(limit.Take(start + absl::Hours(1)), 1);
}

}  // namespace
}  // namespace epikv
