#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "policies/registry.h"
#include "tests/fixtures/fake_sequence.h"

// expected_attention where its golden, kvpress's ExpectedAttentionPress, says nothing.

namespace epikv {
namespace expected_attention_test {

// The first four tokens are outliers that share no attention: where there are no others, none is
// worth more than another, and the older goes.
TEST(ExpectedAttention, RanksACacheOfOutliersAlone) {
  FakeSequence sequence({.spec = FindPolicy(AllPolicies(), "expected_attention"),
                         .params = {{"slack", int64_t{0}}},
                         .prompt_tokens = 3,
                         .budget = 2},
                        RandomWorld(1, 1 << 20));
  sequence.Prefill(3);
  ASSERT_TRUE(sequence.OverBudget());
  for (const std::vector<int32_t>& victims : sequence.Round()) {
    EXPECT_THAT(victims, testing::ElementsAre(0));
  }
  sequence.Decode();  // the fourth
  for (const std::vector<int32_t>& victims : sequence.Round()) {
    EXPECT_THAT(victims, testing::ElementsAre(1));
  }
}

}  // namespace expected_attention_test
}  // namespace epikv
