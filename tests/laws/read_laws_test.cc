// Laws of what reads a part of the cache: a budget for what attention reads, beside what is kept.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/fixtures/engine_harness.h"
#include "tests/fixtures/law_cases.h"
#include "tests/fixtures/law_model.h"

namespace epikv {
namespace read_laws_test {

RequestOptions Reading(RequestOptions options, int64_t tokens, int64_t page, int64_t dense) {
  options.kv.policy = "quest";
  options.kv.budget = tokens;
  options.kv.params = {{"page", page}, {"dense_layers", dense}};
  return options;
}

// (model, K and V as int8)
class Reads : public ::testing::TestWithParam<std::string> {
 protected:
  bool is_int8() const { return GetParam().ends_with("_int8"); }
  std::string model() const {
    return is_int8() ? GetParam().substr(0, GetParam().size() - 5) : GetParam();
  }
  EngineHarness Harness(HarnessOptions options = {}) const {
    options.kv_dtype = is_int8() ? KvDType::kInt8 : KvDType::kModel;
    return EngineHarness(ModelPath(model()), std::move(options));
  }
};

// A step's logits are those of plain attention over the pages that the definition reads.
TEST_P(Reads, ArePlainAttentionOverTheChosenPages) {
  EngineHarness harness = Harness();
  constexpr int64_t kPrompt = 70;
  for (const auto& [tokens, page, dense] :
       std::vector<std::tuple<int64_t, int64_t, int64_t>>{{32, 8, 0}, {24, 8, 1}, {20, 4, 0}}) {
    SCOPED_TRACE(::testing::Message() << tokens << " tokens, pages of " << page);
    const RequestOptions options =
        Reading(Scoring(harness.manifest(), kPrompt, 60, 21), tokens, page, dense);
    const Transcript transcript = harness.Run(options);
    ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
    const std::vector<at::Tensor> got = harness.model().TakeLogits();
    const MaskedReference reference(harness.model(), is_int8() ? KvDType::kInt8 : KvDType::kModel);
    const MaskedReference::Reading reading = {
        .from = kPrompt,
        .limit = {.tokens = tokens, .rule = {.page = page, .dense_layers = dense}}};
    const std::vector<int32_t> cached = CachedTokens(options);
    const auto wanted = reference.Run(cached, {}, PositionMode::kAbsolute, {}, reading);
    const auto whole = reference.Run(cached, {});
    harness.model().TakeLogits();
    double furthest = 0, from_whole = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      const at::Tensor& of_step = wanted[kPrompt - 1 + i].logits;
      furthest = std::max(furthest, (got[i] - of_step).abs().max().item<double>());
      from_whole =
          std::max(from_whole, (got[i] - whole[kPrompt - 1 + i].logits).abs().max().item<double>());
    }
    EXPECT_LT(furthest, is_int8() ? 0.1 : 2e-4);
    EXPECT_GT(from_whole, 10 * furthest) << "what is not read would be missed";
  }
}

// A budget that holds everything gives the bits of `full`.
TEST_P(Reads, EnoughGivesTheBitsOfFull) {
  for (const DecodeKernel kernel : {DecodeKernel::kBatch, DecodeKernel::kFlash}) {
    EngineHarness harness = Harness({.decode_kernel = kernel});
    const RequestOptions options = Scoring(harness.manifest(), 40, 60, 7);
    ASSERT_TRUE(harness.Run(options).ok());
    const std::vector<at::Tensor> full = harness.model().TakeLogits();
    for (const int64_t tokens : {99, 1000}) {
      ASSERT_TRUE(harness.Run(Reading(options, tokens, 8, 0)).ok());
      EXPECT_TRUE(SameBits(full, harness.model().TakeLogits())) << tokens;
    }
    // All pages but none of the last: what is read by steps that hold fewer.
    const Transcript most = harness.Run(Reading(options, 96, 8, 0));
    ASSERT_TRUE(most.ok());
    EXPECT_EQ(most.finished->kv.rounds, 0);
    harness.model().TakeLogits();
  }
}

// Beside others, cut into chunks, from cached prefixes and in several completions: what it reads is
// its own.
TEST_P(Reads, DoNotDependOnNeighbours) {
  auto run = [&](bool beside) {
    EngineHarness harness = Harness({.max_step_tokens = beside ? 37 : 512,
                                     .prefill_chunk_tokens = 32,
                                     .deterministic = true,
                                     .max_prefix_bytes = 1 << 20});
    RequestOptions options;
    options.prompt = Text(harness.manifest(), 80, 3);
    options.stop = {.max_output_tokens = 40, .ignore_end = true};
    options.output.logprobs = true;
    options.sampling = {.temperature = 1.0f, .seed = 5};
    options.completions = 2;
    options = Reading(options, 24, 8, 1);
    if (beside) {
      harness.Submit(Reading(Scoring(harness.manifest(), 90, 30, 9), 32, 4, 0));
      harness.Submit(Scoring(harness.manifest(), 50, 50, 4));
      harness.Run(options);  // leaves its prefix
    }
    Transcript transcript = harness.Run(options);
    EXPECT_TRUE(transcript.ok()) << transcript.finished->status;
    EXPECT_EQ(transcript.finished->cached_prompt_tokens > 0, beside);
    return transcript;
  };
  const Transcript alone = run(false), beside = run(true);
  for (size_t i = 0; i < alone.completions.size(); ++i) {
    EXPECT_EQ(alone.completions[i].tokens, beside.completions[i].tokens) << i;
    EXPECT_EQ(alone.completions[i].logprobs, beside.completions[i].logprobs) << i;
  }
}

// Whatever a policy evicts, and however lanes are laid out: what is kept can be read, at every
// step.
TEST_P(Reads, EveryKeptTokenCanBeRead) {
  const std::vector<PolicyCase> policies = {
      {"Random", "random", {}},
      {"Knorm", "knorm", {{"slack", int64_t{7}}}},
      {"StreamingLlm", "streaming_llm", {}},
      {"HeadPool", "snapkv", {{"window", int64_t{8}}, {"allocator", std::string("head_pool")}}},
      {"ModelPool", "laprox", {{"window", int64_t{8}}}},  // a lane may hold much of it
      {"Bits", "thinkv_tbe", {}}};
  for (const PolicyCase& policy : policies) {
    SCOPED_TRACE(policy.label);
    EngineHarness harness = Harness({.prefill_chunk_tokens = 32});
    RequestOptions options = WithPolicy(Scoring(harness.manifest(), 60, 80, 7), policy, 80);
    options.kv.params.merge(SmallParams(*FindPolicy(AllPolicies(), policy.policy)));
    options.kv.read_tokens = 48;
    if (std::holds_alternative<Rejection>(harness.admission().Resolve(options))) {
      ADD_FAILURE() << std::get<Rejection>(harness.admission().Resolve(options)).message;
      continue;
    }
    const auto transcript = harness.Submit(options);
    harness.OnStep([&] {
      ASSERT_TRUE(harness.executor().PagesHold());
      EXPECT_LE(harness.executor().used_bytes(), harness.engine().ledger().reserved());
    });
    harness.RunAll();
    ASSERT_TRUE(transcript->ok()) << transcript->finished->status;
    EXPECT_GT(transcript->finished->kv.evicted_entries, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Reads, ::testing::Values("gqa", "mha", "gqa_int8"),
                         [](const auto& info) { return info.param; });

}  // namespace read_laws_test
}  // namespace epikv
