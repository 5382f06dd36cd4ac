#include "policies/loops.h"

#include <gtest/gtest.h>

#include <tuple>
#include <vector>

#include "policies/random.h"

// Policies' inner loops against the same in double, where a policy's own test does not reach them.

namespace epikv {
namespace loops_test {

std::vector<float> Draw(int64_t count, uint64_t stream) {
  const CounterRng rng(/*seed=*/11, stream);
  std::vector<float> drawn(count);
  for (int64_t i = 0; i < count; ++i) drawn[i] = static_cast<float>(2 * rng.Uniform(i) - 1);
  return drawn;
}

// Of as many keys as a block has, fewer and more; of widths with whole tiles of rows and without.
class MeetNormalTest : public ::testing::TestWithParam<std::tuple<int64_t, int64_t>> {};

TEST_P(MeetNormalTest, IsWhatItSays) {
  const auto [n, width] = GetParam();
  constexpr int64_t kHeads = 3;
  const std::vector<float> keys = Draw(n * width, 0), mean = Draw(kHeads * width, 1),
                           covariance = Draw(kHeads * width * width, 2);
  std::vector<float> of_mean(kHeads * n), of_spread(kHeads * n, 7);
  MeetNormal(keys.data(), n, width, mean.data(), nullptr, kHeads, of_mean.data(), of_spread.data());
  EXPECT_EQ(of_spread, std::vector<float>(kHeads * n, 7));
  const std::vector<float> without = of_mean;
  MeetNormal(keys.data(), n, width, mean.data(), covariance.data(), kHeads, of_mean.data(),
             of_spread.data());
  EXPECT_EQ(of_mean, without);
  for (int64_t head = 0; head < kHeads; ++head) {
    for (int64_t key = 0; key < n; ++key) {
      double dot = 0, quadratic = 0;
      for (int64_t i = 0; i < width; ++i) {
        const double x = keys[key * width + i];
        dot += x * mean[head * width + i];
        for (int64_t j = 0; j < width; ++j) {
          quadratic += x * covariance[(head * width + i) * width + j] * keys[key * width + j];
        }
      }
      EXPECT_NEAR(of_mean[head * n + key], dot, 1e-5) << head << " " << key;
      EXPECT_NEAR(of_spread[head * n + key], quadratic, 1e-4) << head << " " << key;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, MeetNormalTest,
                         ::testing::Combine(::testing::Values(1, 16, 17, 40),
                                            ::testing::Values(1, 2, 6, 8, 64)));

}  // namespace loops_test
}  // namespace epikv
