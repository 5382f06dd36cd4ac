#include "runtime/ledger.h"

#include <gtest/gtest.h>

namespace epikv {
namespace {

constexpr SequenceId kA{1}, kB{2};

TEST(Ledger, FitsExactlyUpToTheCapacity) {
  Ledger ledger(100);
  EXPECT_TRUE(ledger.Fits(100));
  EXPECT_FALSE(ledger.Fits(101));
  ledger.Reserve(kA, 60);
  EXPECT_EQ(ledger.reserved(), 60);
  EXPECT_TRUE(ledger.Fits(40));
  EXPECT_FALSE(ledger.Fits(41));
}

TEST(Ledger, ShrinkGivesBackTheDifference) {
  Ledger ledger(100);
  ledger.Reserve(kA, 60);
  ledger.Reserve(kB, 40);
  EXPECT_FALSE(ledger.Fits(1));
  ledger.Shrink(kA, 25);
  EXPECT_EQ(ledger.reserved(), 65);
  ledger.Shrink(kA, 25);
  EXPECT_EQ(ledger.reserved(), 65);
  EXPECT_TRUE(ledger.Fits(35));
}

TEST(Ledger, ReleaseGivesBackWhatIsHeld) {
  Ledger ledger(100);
  ledger.Reserve(kA, 60);
  ledger.Reserve(kB, 40);
  ledger.Shrink(kA, 25);
  ledger.Release(kA);
  EXPECT_EQ(ledger.reserved(), 40);
  ledger.Release(kB);
  EXPECT_EQ(ledger.reserved(), 0);
}

TEST(Ledger, IdMayBeUsedAgainAfterRelease) {
  Ledger ledger(10);
  ledger.Reserve(kA, 10);
  ledger.Release(kA);
  ledger.Reserve(kA, 7);
  EXPECT_EQ(ledger.reserved(), 7);
}

TEST(LedgerDeathTest, BreachesEndTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  Ledger ledger(100);
  ledger.Reserve(kA, 60);
  EXPECT_DEATH(ledger.Reserve(kB, 41), "does not fit");
  EXPECT_DEATH(ledger.Reserve(kA, 1), "twice");
  EXPECT_DEATH(ledger.Shrink(kA, 61), "only shrinks");
  EXPECT_DEATH(ledger.Shrink(kB, 0), "only shrinks");
  EXPECT_DEATH(ledger.Release(kB), "not reserved");
}

}  // namespace
}  // namespace epikv
