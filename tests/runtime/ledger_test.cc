#include "runtime/admission/ledger.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace epikv {
namespace ledger_test {

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

TEST(Ledger, RefusesBreachesAndStaysAsItWas) {
  Ledger ledger(100);
  ledger.Reserve(kA, 60);
  EXPECT_THROW(ledger.Reserve(kB, 41), std::logic_error);
  EXPECT_THROW(ledger.Reserve(kA, 1), std::logic_error);
  EXPECT_THROW(ledger.Shrink(kA, 61), std::logic_error);
  EXPECT_THROW(ledger.Shrink(kB, 0), std::logic_error);
  EXPECT_THROW(ledger.Release(kB), std::logic_error);
  EXPECT_EQ(ledger.reserved(), 60);
  EXPECT_EQ(ledger.held(kA), 60);
}

}  // namespace ledger_test
}  // namespace epikv
