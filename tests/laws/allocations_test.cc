// What a step makes: counted, so that nobody adds a tensor for every sequence or cached token.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "runtime/base/allocation_meter.h"
#include "tests/fixtures/engine_harness.h"
#include "tests/fixtures/law_cases.h"
#include "tests/fixtures/law_model.h"

namespace epikv {
namespace allocations_test {

using ::testing::Each;

TEST(AllocationMeter, CountsTensorsAndTheMostOfThemAtOnce) {
  const at::Tensor before = at::ones({100});
  const AllocationMeter meter;
  EXPECT_EQ(meter.allocations(), 0);
  { const at::Tensor one = at::empty({256}, at::kFloat), other = at::empty({512}, at::kFloat); }
  const at::Tensor last = at::empty({300}, at::kFloat);
  EXPECT_EQ(meter.allocations(), 3);
  EXPECT_EQ(meter.peak_bytes(), 768 * 4);
}

TEST(AllocationMeter, OfTheInnermostAlone) {
  const AllocationMeter outer;
  {
    const AllocationMeter inner;
    const at::Tensor tensor = at::empty({10});
    EXPECT_EQ(inner.allocations(), 1);
  }
  EXPECT_EQ(outer.allocations(), 0);
}

class DecodeStep : public ::testing::TestWithParam<const char*> {
 protected:
  // Tensors that each of some decode steps of so many sequences makes.
  std::vector<int64_t> Tensors(int sequences, int64_t prompt) const {
    EngineHarness harness(ModelPath("gqa"), {.policies = LawPolicies(), .end_tokens = false});
    const std::string policy = GetParam();
    for (int i = 0; i < sequences; ++i) {
      RequestOptions options = Scoring(harness.manifest(), prompt, 64, 7 + i);
      if (policy != "full") options = WithPolicy(options, {policy, policy, {}}, prompt + 24);
      harness.Submit(std::move(options));
    }
    for (int i = 0; i < 16 && harness.engine().Step(); ++i) continue;  // prompts, first rounds
    std::vector<int64_t> tensors;
    for (int i = 0; i < 8; ++i) {
      harness.model().TakeLogits();
      const AllocationMeter meter;
      EXPECT_TRUE(harness.engine().Step());
      const int64_t made = meter.allocations();
      tensors.push_back(made - std::ssize(harness.model().TakeLogits()));  // the test's own copies
    }
    return tensors;
  }
};

TEST_P(DecodeStep, MakesAsManyTensorsForManySequencesAndTokensAsForFew) {
  const std::vector<int64_t> few = Tensors(2, 24);  // one alone: the model multiplies a vector
  EXPECT_GT(few[0], 0);
  EXPECT_THAT(Tensors(2, 120), Each(few[0]));
  EXPECT_THAT(Tensors(8, 24), Each(few[0]));
}

INSTANTIATE_TEST_SUITE_P(Policies, DecodeStep, ::testing::Values("full", "sliding", "epikv_flat"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace allocations_test
}  // namespace epikv
