// What several threads compute.

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "runtime/kernels/dense_matmul.h"
#include "tests/fixtures/engine_harness.h"
#include "tests/fixtures/law_cases.h"
#include "tests/fixtures/law_model.h"

namespace epikv {
namespace threads_test {

class Threads : public ::testing::TestWithParam<const char*> {
 protected:
  // Of prompts of several lengths, and the tokens after them.
  static std::vector<at::Tensor> Logits(const std::string& model, int threads) {
    EngineHarness harness(ModelPath(model), {.policies = LawPolicies(), .end_tokens = false});
    for (int i = 0; i < 5; ++i) harness.Submit(Scoring(harness.manifest(), 20 + 25 * i, 8, 7 + i));
    at::set_num_threads(threads);
    harness.RunAll();
    at::set_num_threads(1);
    return harness.model().TakeLogits();
  }
};

// Threads take parts of products and lanes, whoever comes first: no bit may tell.
TEST_P(Threads, GiveTheBitsOfOne) {
  const bool bfloat16 = std::string(GetParam()) == "wide_bf16";
  if (!FastestDensePath(bfloat16 ? DType::kBFloat16 : DType::kFloat32).has_value()) {
    GTEST_SKIP() << "the products are not ours";
  }
  const std::vector<at::Tensor> one = Logits(GetParam(), 1);
  ASSERT_EQ(one.size(), 5 * 8u);
  EXPECT_TRUE(SameBits(Logits(GetParam(), 4), one));
}

INSTANTIATE_TEST_SUITE_P(Models, Threads, ::testing::Values("wide", "wide_bf16", "wide_int8"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace threads_test
}  // namespace epikv
