#include "runtime/base/huge_pages.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace epikv {
namespace huge_pages_test {

bool IsZero(const char* memory, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) {
    if (memory[i] != 0) return false;
  }
  return true;
}

TEST(WeightArena, GivesZerosInCacheLinesOfTheirOwn) {
  WeightArena arena;
  std::vector<std::shared_ptr<char>> given;
  for (const int64_t bytes : {1, 63, 64, 65, 5'000, 3 << 20}) {
    given.push_back(arena.Allocate(bytes));
    ASSERT_EQ(reinterpret_cast<uintptr_t>(given.back().get()) % 64, 0u);
    ASSERT_TRUE(IsZero(given.back().get(), bytes)) << bytes;
    std::memset(given.back().get(), 1, bytes);  // what comes after is still of zeros
  }
}

TEST(WeightArena, SmallOnesLieSideBySideInHugePages) {
  WeightArena arena;
  const std::shared_ptr<char> first = arena.Allocate(100), second = arena.Allocate(100);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first.get()) % kHugePage, 0u);
  EXPECT_EQ(second.get(), first.get() + 128);
}

TEST(WeightArena, LargerThanARegion) {
  WeightArena arena;
  const std::shared_ptr<char> small = arena.Allocate(64);
  const int64_t bytes = (int64_t{65} << 20) + 1;
  const std::shared_ptr<char> large = arena.Allocate(bytes);
  large.get()[bytes - 1] = 1;
  EXPECT_EQ(small.get()[0], 0);
  EXPECT_EQ(arena.Allocate(64).get()[0], 0);  // of a page of zeros, whoever is before it
}

TEST(WeightArena, LivesAsLongAsItsWeights) {
  std::shared_ptr<char> one, other;
  {
    WeightArena arena;
    one = arena.Allocate(1000);
    other = arena.Allocate(1000);
  }
  one.reset();
  std::memset(other.get(), 7, 1000);
  EXPECT_EQ(other.get()[999], 7);
}

TEST(AdviseHugePages, TakesAnyMemory) {
  std::vector<char> small(100), large(3 * kHugePage);
  AdviseHugePages(small.data(), 100);
  AdviseHugePages(large.data() + 1, 3 * kHugePage - 1);
  AdviseHugePages(nullptr, 0);
  EXPECT_TRUE(IsZero(large.data(), 3 * kHugePage));
}

}  // namespace huge_pages_test
}  // namespace epikv
