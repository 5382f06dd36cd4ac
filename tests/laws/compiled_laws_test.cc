// Engines of a compiled model: what they say and keep is what those of its TorchScript file do.

#include <gtest/gtest.h>

#include <string>
#include <variant>

#include "tests/fixtures/engine_harness.h"
#include "tests/fixtures/law_cases.h"

namespace epikv {
namespace compiled_laws_test {

class EveryPolicyCompiled : public testing::TestWithParam<PolicyCase> {};

TEST_P(EveryPolicyCompiled, SaysAndKeepsTheSame) {
  // Longer prompts are read in several steps, most of which have no logits.
  const HarnessOptions options{.prefill_chunk_tokens = 48, .end_tokens = false};
  EngineHarness script(ModelPath("tied"), options), compiled(ModelPath("tied_compiled"), options);
  for (const int64_t prompt : {30, 120}) {  // beside the budget, and over it
    RequestOptions asked;
    asked.prompt = Text(script.manifest(), prompt, 3);
    asked.stop.max_output_tokens = 90;
    asked.sampling = {.temperature = 0.7f, .seed = 5};
    asked.output.logprobs = true;
    asked.guess_tokens = prompt < 80 ? 6 : 0;
    asked = WithPolicy(asked, GetParam(), 80);
    if (std::holds_alternative<Rejection>(script.admission().Resolve(asked))) continue;
    const Transcript one = script.Run(asked), other = compiled.Run(asked);
    ASSERT_TRUE(one.ok()) << one.finished->status;
    ASSERT_TRUE(other.ok()) << other.finished->status;
    EXPECT_EQ(other.tokens, one.tokens);
    EXPECT_EQ(other.logprobs, one.logprobs);
    ASSERT_EQ(other.evictions.size(), one.evictions.size());
    for (size_t round = 0; round < one.evictions.size(); ++round) {
      const EvictionTrace &is = other.evictions[round], &wanted = one.evictions[round];
      EXPECT_EQ(is.at_token, wanted.at_token);
      ASSERT_EQ(is.victims.size(), wanted.victims.size());
      for (size_t lane = 0; lane < wanted.victims.size(); ++lane) {
        EXPECT_EQ(is.victims[lane].index, wanted.victims[lane].index);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Laws, EveryPolicyCompiled, testing::ValuesIn(EvictingPolicies()),
                         [](const auto& info) { return info.param.label; });

}  // namespace compiled_laws_test
}  // namespace epikv
