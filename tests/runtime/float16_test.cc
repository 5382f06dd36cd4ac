#include "runtime/base/float16.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>

// Against the compiler's own binary16, where it has one.

namespace epikv {
namespace float16_test {

#if defined(__aarch64__)
using Theirs = __fp16;
#elif !defined(__clang__) || __clang_major__ >= 15
using Theirs = _Float16;
#endif

#if defined(__aarch64__) || !defined(__clang__) || __clang_major__ >= 15

uint16_t Bits(const Theirs& x) { return std::bit_cast<uint16_t>(x); }

void ExpectNarrowed(float x) {
  const uint16_t expected = Bits(static_cast<Theirs>(x)), got = NarrowFloat16(x);
  if (std::isnan(x)) {
    EXPECT_TRUE(std::isnan(WidenFloat16(got)));
  } else {
    ASSERT_EQ(got, expected) << x;
  }
}

TEST(Float16, EveryOneIsWidened) {
  for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
    const auto narrow = std::bit_cast<Theirs>(static_cast<uint16_t>(bits));
    const float expected = static_cast<float>(narrow), got = WidenFloat16(bits);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(got)) << bits;
    } else {
      ASSERT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(expected)) << bits;
    }
  }
}

// Each of them, what lies half way to the next, and next to that; and floats of any size.
TEST(Float16, IsRoundedToTheNearestAndTiesToEven) {
  for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
    const float x = WidenFloat16(bits), next = WidenFloat16(bits + 1);
    const float between = x + (next - x) / 2;
    for (float y : {x, between, std::nextafter(between, x), std::nextafter(between, next)}) {
      ExpectNarrowed(y);
    }
  }
  ExpectNarrowed(65519.996f);
  ExpectNarrowed(65520.0f);  // half way to what would be 2^16: infinity
  std::mt19937 random(1);
  for (int i = 0; i < 1 << 20; ++i) {
    ExpectNarrowed(std::bit_cast<float>(static_cast<uint32_t>(random())));
  }
}

#endif

}  // namespace float16_test
}  // namespace epikv
