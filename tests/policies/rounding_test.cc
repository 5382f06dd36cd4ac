#include "policies/rounding.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

namespace epikv {
namespace rounding_test {

TEST(Rounding, KeepsWhatItsIntegersCanSay) {
  const at::Tensor channel = at::arange(-7, 8, at::kFloat).unsqueeze(1);  // [15, 1]
  EXPECT_TRUE(at::equal(RoundedKeys(channel, 4), channel));
  const at::Tensor token = at::arange(-127, 128, 17, at::kFloat).unsqueeze(0);  // [1, 15]
  EXPECT_TRUE(at::equal(RoundedValues(token, 8), token));
}

TEST(Rounding, IsOffByHalfAStepAtMost) {
  const at::Tensor rows = at::randn({kRoundingGroup, 48});
  for (const int64_t bits : {4, 8}) {
    // And by what bfloat16 leaves out of a scale: a 256th of the number.
    const double steps = static_cast<double>((int64_t{1} << (bits - 1)) - 1);
    const at::Tensor step = rows.abs().amax(0, /*keepdim=*/true) / steps;
    const at::Tensor off = (RoundedKeys(rows, bits) - rows).abs();
    EXPECT_TRUE((off <= 0.51 * step + rows.abs() / 256).all().item<bool>()) << bits;
    EXPECT_GT(off.max().item<double>(), 0.25 * step.min().item<double>()) << bits;
  }
}

TEST(Rounding, TwoBitsAreASignOrNothing) {
  std::vector<float> numbers(kRoundingGroup, 0.125F);
  numbers[0] = numbers[1] = 3;
  numbers[5] = -6;  // mean 1.6: what is above 1.1 stays, as 4 with its sign
  const at::Tensor rounded = RoundedValues(at::tensor(numbers).unsqueeze(0), 2);
  std::vector<float> expected(kRoundingGroup, 0);
  expected[0] = expected[1] = 4;
  expected[5] = -4;
  EXPECT_TRUE(at::equal(rounded, at::tensor(expected).unsqueeze(0)));
}

TEST(Rounding, GroupsAreAChannelOfKeysAndSixteenChannelsOfAValue) {
  at::Tensor rows = at::ones({4, 20});
  rows[0][3] = 127;
  const at::Tensor keys = RoundedKeys(rows, 4), values = RoundedValues(rows, 4);
  at::Tensor of_keys = at::ones({4, 20});
  of_keys.select(1, 3).fill_(0);  // beside 127 a 1 is nothing
  at::Tensor of_values = at::ones({4, 20});
  of_values[0].narrow(0, 0, kRoundingGroup).fill_(0);
  of_keys[0][3] = of_values[0][3] = keys[0][3].item<float>();
  EXPECT_NEAR(keys[0][3].item<float>(), 127, 0.5);
  EXPECT_TRUE(at::allclose(keys, of_keys, 0.004));
  EXPECT_TRUE(at::allclose(values, of_values, 0.004));
}

TEST(Rounding, ANumberThatIsNotFiniteSpoilsItsGroupAlone) {
  for (const int64_t bits : {2, 4, 8}) {
    at::Tensor rows = at::ones({3, 32});
    rows[1][2] = INFINITY;
    const at::Tensor values = RoundedValues(rows, bits);
    EXPECT_TRUE(values[1].narrow(0, 0, kRoundingGroup).isnan().all().item<bool>());
    EXPECT_EQ(values.isnan().sum().item<int64_t>(), kRoundingGroup);
    EXPECT_EQ(RoundedKeys(rows, bits).isnan().sum().item<int64_t>(), 3);
  }
}

TEST(Rounding, NothingIsLargerThanWhatWas) {
  for (const int64_t bits : {2, 4, 8}) {
    const at::Tensor rows = at::full({16, 16}, 65504.0F);  // the largest of float16
    EXPECT_LE(RoundedKeys(rows, bits).max().item<float>(), 65504.0F);
  }
}

TEST(Rounding, AGroupOfNothingStaysNothing) {
  const at::Tensor rows = at::zeros({2, 16});
  for (const int64_t bits : {2, 4, 8}) EXPECT_TRUE(at::equal(RoundedKeys(rows, bits), rows));
}

TEST(Rounding, PackedRowsHaveTheirScales) {
  // Of a whole group a sixteenth of a scale each; of what is left of one, K's are still all there.
  EXPECT_EQ(PackedBytes(16, 32, 32, 4), 16 * 64 * (4 + 1) / 8);
  EXPECT_EQ(PackedBytes(1, 32, 32, 4), (64 * 4 + 32 * 16 + 2 * 16) / 8);
  EXPECT_EQ(PackedBytes(2, 8, 20, 2), (2 * 28 * 2 + 8 * 16 + 2 * 2 * 16) / 8);
}

}  // namespace rounding_test
}  // namespace epikv
