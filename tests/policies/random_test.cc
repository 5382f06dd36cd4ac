#include "policies/random.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

namespace epikv {
namespace random_test {

// Known answers of Philox4x32-10, from the Random123 distribution.
TEST(CounterRngTest, IsPhilox) {
  EXPECT_EQ(CounterRng(0, 0).Uint64(0), 0xe169c58d6627e8d5);
  EXPECT_EQ(CounterRng(~0ull, ~0ull).Uint64(~0ull), 0x41c83b0e408f276d);
  EXPECT_EQ(CounterRng(0x299f31d0a4093822, 0x0370734413198a2e).Uint64(0x85a308d3243f6a88),
            0x94fdccebd16cfe09);
}

TEST(CounterRngTest, SeedStreamAndCounterAllMatter) {
  std::set<uint64_t> seen;
  for (uint64_t high : {0ull, 1ull << 32}) {
    for (uint64_t i = 0; i < 4; ++i) {
      for (uint64_t j = 0; j < 4; ++j) {
        for (uint64_t k = 0; k < 4; ++k)
          seen.insert(CounterRng(high + i, high + j).Uint64(high + k));
      }
    }
  }
  EXPECT_EQ(seen.size(), 128);
}

TEST(CounterRngTest, UniformIsBelowOneAndEven) {
  const CounterRng rng(1, 2);
  constexpr int kDraws = 100000;
  double sum = 0, squares = 0;
  for (int i = 0; i < kDraws; ++i) {
    const double x = rng.Uniform(i);
    ASSERT_GE(x, 0);
    ASSERT_LT(x, 1);
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / kDraws, 0.5, 0.005);
  EXPECT_NEAR(squares / kDraws, 1.0 / 3, 0.005);
}

TEST(CounterRngTest, BelowIsEven) {
  const CounterRng rng(3, 4);
  constexpr int kDraws = 70000, kValues = 7;
  std::vector<int> counts(kValues);
  for (int i = 0; i < kDraws; ++i) ++counts[rng.Below(kValues, i)];
  double chi_square = 0;
  for (int count : counts) chi_square += std::pow(count - kDraws / kValues, 2) * kValues / kDraws;
  EXPECT_LT(chi_square, 22.5);  // 6 degrees of freedom, p = 0.001
}

TEST(CounterRngTest, BelowHoldsAtTheEnds) {
  const CounterRng rng(5, 6);
  for (uint64_t i = 0; i < 1000; ++i) {
    EXPECT_EQ(rng.Below(1, i), 0);
    EXPECT_LT(rng.Below(~0ull, i), ~0ull);
  }
}

}  // namespace random_test
}  // namespace epikv
