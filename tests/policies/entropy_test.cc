#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "policies/loops.h"

namespace epikv {
namespace entropy_test {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

double Reference(const std::vector<float>& logits) {
  double mass = 0, entropy = 0;
  for (float logit : logits) mass += std::exp(static_cast<double>(logit));
  for (float logit : logits) {
    const double p = std::exp(static_cast<double>(logit)) / mass;
    if (p > 0) entropy -= p * std::log(p);
  }
  return entropy;
}

TEST(Entropy, IsThatOfTheSoftmax) {
  std::mt19937 draw(1);
  for (const int64_t n : {1, 2, 15, 16, 17, 100, 1000, 152064}) {
    for (const float spread : {0.0f, 0.1f, 3.0f, 20.0f}) {
      std::vector<float> logits(n);
      for (float& logit : logits) logit = std::normal_distribution<float>(2, spread + 1e-6f)(draw);
      EXPECT_NEAR(Entropy(logits), Reference(logits), 2e-5 * std::log(n + 1.0))
          << n << " tokens, " << spread;
    }
  }
}

TEST(Entropy, OfACertainTokenIsNothing) {
  std::vector<float> logits(40, -3.0f);
  logits[33] = 200;
  EXPECT_EQ(Entropy(logits), 0);
}

TEST(Entropy, TokensThatCannotComeHaveNoShare) {
  std::vector<float> logits(50, -kInfinity);
  for (const int64_t at : {3, 20, 48, 49}) logits[at] = 7;
  EXPECT_NEAR(Entropy(logits), std::log(4.0), 1e-6);
}

TEST(Entropy, OfWhatIsNoNumberIsNone) {
  for (const float wrong : {std::numeric_limits<float>::quiet_NaN(), kInfinity}) {
    for (const int64_t at : {0, 17, 49}) {
      std::vector<float> logits(50, 1);
      logits[at] = wrong;
      EXPECT_TRUE(std::isnan(Entropy(logits))) << wrong << " at " << at;
    }
  }
}

}  // namespace entropy_test
}  // namespace epikv
