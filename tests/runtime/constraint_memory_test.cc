#include "runtime/constraints/constraint_memory.h"

#include <gtest/gtest.h>

#include <memory>

namespace epikv {
namespace constraint_memory_test {

TEST(ConstraintMemory, ATenantMayHoldAsMuchAsIsLeftToAll) {
  const auto memory = std::make_shared<ConstraintMemory>(100);
  const auto one = memory->Of("one"), other = memory->Of("other");
  one->Hold(50);
  EXPECT_FALSE(one->IsFull());
  one->Hold(1);
  EXPECT_TRUE(one->IsFull());
  EXPECT_FALSE(other->IsFull());
  other->Hold(25);
  EXPECT_TRUE(other->IsFull());
  EXPECT_EQ(other->left(), 24);
  one->Hold(-51);
  EXPECT_FALSE(other->IsFull());
  EXPECT_EQ(*memory->bytes(), 25);
}

TEST(ConstraintMemory, BeyondTheLimitThoseWhoHoldMostShrink) {
  const auto memory = std::make_shared<ConstraintMemory>(100);
  const auto one = memory->Of("one");
  auto other = memory->Of("other");
  one->Hold(80);
  other->Hold(20);
  EXPECT_FALSE(one->MustShrink());
  other->Hold(20);
  EXPECT_TRUE(one->MustShrink());
  EXPECT_FALSE(other->MustShrink());
  other->Hold(40);  // as much as the other
  EXPECT_TRUE(other->MustShrink());
  one->Hold(-80);
  other->Hold(21);
  EXPECT_TRUE(other->MustShrink());
  EXPECT_FALSE(one->MustShrink());
  other->Hold(-101);
  other.reset();
  one->Hold(101);
  EXPECT_TRUE(one->MustShrink());
}

TEST(ConstraintMemory, ATenantHasOneShareAsLongAsSomethingOfHisIsHeld) {
  const auto memory = std::make_shared<ConstraintMemory>(100);
  auto held = memory->Of("one");
  held->Hold(7);
  EXPECT_EQ(memory->Of("one"), held);
  EXPECT_EQ(memory->Of("other")->bytes(), 0);
  held->Hold(-7);
  held.reset();
  EXPECT_EQ(memory->Of("one")->bytes(), 0);
}

}  // namespace constraint_memory_test
}  // namespace epikv
