// Steering: the vector is added where the artefact says, as strongly as the request says, and to
// nobody else's tokens. What it changed is never cached for others.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "policies/steering.h"
#include "tests/fixtures/engine_harness.h"
#include "tests/fixtures/law_cases.h"
#include "tests/fixtures/law_model.h"

namespace epikv {
namespace steering_laws_test {

constexpr int64_t kPrompt = 40, kOutput = 150;

// Of every third token; sentences end at every seventh, and every fifth marks one.
std::shared_ptr<const SteeringVector> VectorOf(const Manifest& manifest, int64_t layer) {
  auto vector = std::make_shared<SteeringVector>();
  vector->layer = layer;
  for (int64_t c = 0; c < manifest.hidden_size; ++c) {
    vector->values.push_back(0.05f * static_cast<float>(c % 7 - 3));
  }
  for (int32_t token = 0; token < manifest.vocab_size; ++token) {
    if (token % 3 == 0) vector->at.push_back(token);
    if (token % 7 == 0) vector->ends.push_back(token);
    if (token % 5 == 0) vector->marks.push_back(token);
  }
  return vector;
}

RequestOptions Options(const Manifest& manifest, int64_t seed = 3) {
  RequestOptions options;
  options.prompt = Text(manifest, kPrompt, seed);
  options.stop.max_output_tokens = kOutput;
  options.sampling.temperature = 0.0f;
  options.output.logprobs = options.output.kv_trace = true;
  return options;
}

Request Resolved(const EngineHarness& harness, RequestOptions options,
                 std::optional<Steering> steering) {
  auto request = std::get<Request>(harness.admission().Resolve(std::move(options)));
  request.steering = std::move(steering);
  return request;
}

Transcript TranscriptOf(EngineHarness& harness, const RequestOptions& options,
                        std::optional<Steering> steering) {
  const auto transcript = harness.Submit(Resolved(harness, options, std::move(steering)));
  harness.RunAll();
  return *transcript;
}

// By the rule of the header, of all tokens at once.
std::vector<MaskedReference::Added> AddedTo(const std::vector<int32_t>& text,
                                            const Steering& steering) {
  const at::Tensor vector = at::tensor(steering.vector->values);
  std::vector<MaskedReference::Added> added;
  for (int64_t t = kPrompt; t < std::ssize(text); ++t) {
    if (text[t] % 3 != 0) continue;
    int64_t marked = 0;
    bool mark = false;
    for (int64_t i = 0; i < t / 128 * 128; ++i) {
      mark |= text[i] % 5 == 0;
      if (text[i] % 7 != 0) continue;
      marked += mark;
      mark = false;
    }
    const double amount =
        steering.options.coefficient + steering.options.growth * static_cast<double>(marked);
    added.push_back({.at_token = t, .layer = steering.vector->layer, .vector = amount * vector});
  }
  return added;
}

void ExpectSays(const Transcript& transcript, const std::vector<int32_t>& prompt,
                EngineHarness& harness, const Steering& steering) {
  std::vector<int32_t> text = prompt;
  text.insert(text.end(), transcript.tokens.begin(), transcript.tokens.end() - 1);
  const std::vector<MaskedReference::Step> steps =
      MaskedReference(harness.model())
          .Run(text, DroppedBy(transcript, harness.manifest()), PositionMode::kAbsolute,
               AddedTo(text, steering));
  for (size_t i = 0; i < transcript.tokens.size(); ++i) {
    const at::Tensor logprobs = steps[prompt.size() - 1 + i].logits.to(at::kFloat).log_softmax(0);
    ASSERT_NEAR(transcript.logprobs[i], logprobs[transcript.tokens[i]].item<float>(), 2e-3)
        << "output " << i;
  }
}

struct Place {
  const char* model;
  int64_t layer;
  bool device_path = false;
};
class SteeringLaws : public testing::TestWithParam<Place> {
 protected:
  EngineHarness Harness(HarnessOptions options = {}) const {
    options.device_path = GetParam().device_path;
    options.end_tokens = false;
    return EngineHarness(ModelPath(GetParam().model), std::move(options));
  }
  Steering Of(const EngineHarness& harness, SteeringOptions options) const {
    return {.vector = VectorOf(harness.manifest(), GetParam().layer), .options = options};
  }
};

TEST_P(SteeringLaws, AddsTheVectorWhereTheArtefactSays) {
  EngineHarness harness = Harness();
  const Steering steering = Of(harness, {.coefficient = 1, .growth = 0.25f});
  for (const bool evicts : {false, true}) {
    RequestOptions options = Options(harness.manifest());
    if (evicts) {
      options.kv.policy = "sliding";
      options.kv.budget = int64_t{64};
    }
    const Transcript plain = TranscriptOf(harness, options, std::nullopt);
    const Transcript steered = TranscriptOf(harness, options, steering);
    ASSERT_TRUE(steered.ok()) << steered.finished->status;
    ASSERT_EQ(std::ssize(steered.tokens), kOutput);
    EXPECT_NE(steered.logprobs, plain.logprobs);
    EXPECT_EQ(steered.evictions.empty(), !evicts);
    ExpectSays(steered, options.prompt, harness, steering);
  }
}

TEST_P(SteeringLaws, EachCompletionIsSteeredByItsOwnTokens) {
  EngineHarness harness = Harness();
  const Steering steering = Of(harness, {.coefficient = 1, .growth = 0.25f});
  RequestOptions options = Options(harness.manifest());
  options.completions = 3;
  options.sampling.temperature = 2.0f;
  options.sampling.seed = 5;
  const Transcript transcript = TranscriptOf(harness, options, steering);
  ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
  ASSERT_EQ(transcript.completions.size(), 3u);
  EXPECT_NE(transcript.completions[0].tokens, transcript.completions[1].tokens);
  for (const Transcript& completion : transcript.completions) {
    ExpectSays(completion, options.prompt, harness, steering);
  }
}

TEST_P(SteeringLaws, NeighboursAreNotSteered) {
  HarnessOptions deterministic{.deterministic = !GetParam().device_path};
  EngineHarness harness = Harness(deterministic);
  const Steering steering = Of(harness, {.coefficient = 3});
  const Transcript alone = TranscriptOf(harness, Options(harness.manifest(), 4), std::nullopt);
  const Transcript steered_alone = TranscriptOf(harness, Options(harness.manifest()), steering);
  const auto steered = harness.Submit(Resolved(harness, Options(harness.manifest()), steering));
  const auto beside =
      harness.Submit(Resolved(harness, Options(harness.manifest(), 4), std::nullopt));
  harness.RunAll();
  EXPECT_EQ(beside->tokens, alone.tokens);
  EXPECT_EQ(steered->tokens, steered_alone.tokens);
  if (!deterministic.deterministic) return;
  EXPECT_EQ(beside->logprobs, alone.logprobs);
  EXPECT_EQ(steered->logprobs, steered_alone.logprobs);
}

TEST_P(SteeringLaws, NothingChangesWhereNothingIsAdded) {
  EngineHarness harness = Harness();
  const Transcript plain = TranscriptOf(harness, Options(harness.manifest()), std::nullopt);
  EXPECT_EQ(TranscriptOf(harness, Options(harness.manifest()),
                         Of(harness, {.coefficient = 0, .growth = 0}))
                .logprobs,
            plain.logprobs);
}

TEST_P(SteeringLaws, SteeredOutputIsNotCachedForOthers) {
  EngineHarness harness = Harness({.prefill_chunk_tokens = 16, .max_prefix_bytes = 16 << 20});
  const RequestOptions options = Options(harness.manifest());
  const Transcript steered = TranscriptOf(harness, options, Of(harness, {.coefficient = 3}));
  RequestOptions next = options;
  next.prompt.insert(next.prompt.end(), steered.tokens.begin(), steered.tokens.end());
  next.stop.max_output_tokens = 8;
  const Transcript after = TranscriptOf(harness, next, std::nullopt);
  EXPECT_LE(after.finished->cached_prompt_tokens, kPrompt);
  EngineHarness fresh = Harness();
  EXPECT_EQ(after.tokens, TranscriptOf(fresh, next, std::nullopt).tokens);
  // Its prompt was: that part is not steered.
  EXPECT_GT(after.finished->cached_prompt_tokens, 0);
}

TEST_P(SteeringLaws, APromptFromTheCacheCountsAsIfItHadRun) {
  EngineHarness harness = Harness({.prefill_chunk_tokens = 16, .max_prefix_bytes = 16 << 20});
  const Steering steering = Of(harness, {.coefficient = 1, .growth = 0.25f});
  const RequestOptions options = Options(harness.manifest());
  TranscriptOf(harness, options, steering);
  const Transcript again = TranscriptOf(harness, options, steering);
  EXPECT_GT(again.finished->cached_prompt_tokens, 0);
  ExpectSays(again, options.prompt, harness, steering);
}

// What a policy has the model tell ahead says which tokens of the prompt stay.
TEST_P(SteeringLaws, WhatIsToldAheadIsNotSteered) {
  EngineHarness harness = Harness({.now = absl::Now});
  auto everywhere =
      std::make_shared<SteeringVector>(*VectorOf(harness.manifest(), GetParam().layer));
  everywhere->at.resize(harness.manifest().vocab_size);
  std::iota(everywhere->at.begin(), everywhere->at.end(), 0);
  const Steering steering = {.vector = everywhere, .options = {.coefficient = 50}};
  RequestOptions options = Options(harness.manifest());
  options.prompt = Text(harness.manifest(), 200, 3);
  options.sampling.temperature = 2.0f;  // else some model says one token again and again
  options.sampling.seed = 5;
  options.kv.policy = "laq";
  options.kv.params["window"] = int64_t{16};
  options.kv.budget = int64_t{100};
  for (const char* draft : {"snapkv", "whole"}) {
    options.kv.params["draft"] = std::string(draft);
    const Transcript plain = TranscriptOf(harness, options, std::nullopt);
    const Transcript steered = TranscriptOf(harness, options, steering);
    ASSERT_TRUE(steered.ok()) << steered.finished->status;
    EXPECT_NE(steered.logprobs, plain.logprobs);
    EXPECT_GT(steered.finished->timings.pass, absl::ZeroDuration());
    ASSERT_FALSE(steered.evictions.empty());
    ASSERT_EQ(steered.evictions[0].victims.size(), plain.evictions[0].victims.size());
    for (size_t lane = 0; lane < plain.evictions[0].victims.size(); ++lane) {
      EXPECT_EQ(steered.evictions[0].victims[lane].index, plain.evictions[0].victims[lane].index);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, SteeringLaws,
                         testing::Values(Place{"gqa", 0}, Place{"gqa", 1}, Place{"bent", 1},
                                         Place{"gqa", 1, true}),
                         [](const testing::TestParamInfo<Place>& place) {
                           return std::string(place.param.model) + "_" +
                                  std::to_string(place.param.layer) +
                                  (place.param.device_path ? "_device" : "");
                         });

}  // namespace steering_laws_test
}  // namespace epikv
