// The laws of DESIGN section 8 on random tiny models and on the sample model: each test names its
// law. Law 8, policy by policy, is golden_policies_test.cc.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/fixtures/engine_harness.h"
#include "tests/fixtures/law_cases.h"

namespace epikv {
namespace laws_test {

// ---------------------------------------------------------------------------------------------
// Law 1: `full` equals the reference model.

class FullEqualsTransformers
    : public ::testing::TestWithParam<std::tuple<const char*, DecodeKernel>> {};

TEST_P(FullEqualsTransformers, LogitsAndGreedyTokens) {
  const auto [model, kernel] = GetParam();
  std::ifstream file(absl::StrCat(EPIKV_TEST_MODELS, "/", model, ".json"));
  const auto reference = nlohmann::json::parse(file);
  const PrefillKernel prefill =
      kernel == DecodeKernel::kFlash ? PrefillKernel::kFlash : PrefillKernel::kBatch;
  EngineHarness harness(ModelPath(model), {.decode_kernel = kernel, .prefill_kernel = prefill});
  int64_t rows = 0;
  for (const auto& c : reference["cases"]) {
    const std::vector<int32_t> ids = c["token_ids"];
    if (ids.size() < 2) continue;
    for (bool in_chunks : {false, true}) {
      const size_t prompt = in_chunks ? 1 : (ids.size() + 1) / 2;
      RequestOptions options;
      options.prompt.assign(ids.begin(), ids.begin() + prompt);
      options.forced.assign(ids.begin() + prompt, ids.end());
      options.force_in_chunks = in_chunks;
      const Transcript transcript = harness.Run(options);
      ASSERT_TRUE(transcript.ok());
      const std::vector<at::Tensor> logits = harness.model().TakeLogits();
      ASSERT_EQ(logits.size(), ids.size() - prompt);
      for (size_t i = 0; i < logits.size(); ++i, ++rows) {
        const at::Tensor expected =
            at::tensor(c["logits"][prompt - 1 + i].get<std::vector<float>>());
        EXPECT_LT((logits[i] - expected).abs().max().item<float>(), 1e-4);
      }
    }
  }
  EXPECT_GT(rows, 30);
  for (const auto& c : reference["cases"]) {
    const std::vector<int32_t> greedy = c["greedy"];
    RequestOptions options;
    options.prompt = c["token_ids"].get<std::vector<int32_t>>();
    options.stop.max_output_tokens = greedy.size();
    const Transcript transcript = harness.Run(options);
    for (size_t i = 0; i < transcript.tokens.size(); ++i) {
      if (c["margins"][i].get<float>() < 2e-4) break;  // either token is right from here on
      EXPECT_EQ(transcript.tokens[i], greedy[i]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Law1, FullEqualsTransformers,
    ::testing::Combine(::testing::Values("mha", "gqa", "mqa", "tied", "wide", "sample"),
                       ::testing::Values(DecodeKernel::kBatch, DecodeKernel::kFlash,
                                         DecodeKernel::kMatmul)),
    [](const auto& info) {
      return absl::StrCat(std::get<0>(info.param), "_",
                          std::string(DecodeKernelName(std::get<1>(info.param))));
    });

// How far K and V cached as int8 take logits from the reference's: the differences' root mean
// square and their largest, over the logits' root mean square. Seen: .004 to .008 and .03 to .05,
// the first of each on the sample model, the only trained one.
class FullOfInt8 : public ::testing::TestWithParam<const char*> {};

TEST_P(FullOfInt8, IsNearTransformers) {
  std::ifstream file(absl::StrCat(EPIKV_TEST_MODELS, "/", GetParam(), ".json"));
  const auto reference = nlohmann::json::parse(file);
  EngineHarness harness(ModelPath(GetParam()), {.kv_dtype = KvDType::kInt8});
  double squares = 0, error_squares = 0, largest = 0;
  int64_t count = 0;
  for (const auto& c : reference["cases"]) {
    const std::vector<int32_t> ids = c["token_ids"];
    if (ids.size() < 2) continue;
    RequestOptions options;
    options.prompt.assign(ids.begin(), ids.begin() + 1);
    options.forced.assign(ids.begin() + 1, ids.end());
    ASSERT_TRUE(harness.Run(options).ok());
    const std::vector<at::Tensor> logits = harness.model().TakeLogits();
    for (size_t i = 0; i < logits.size(); ++i) {
      const at::Tensor expected = at::tensor(c["logits"][i].get<std::vector<float>>());
      const at::Tensor error = logits[i] - expected;
      squares += expected.square().sum().item<double>();
      error_squares += error.square().sum().item<double>();
      largest = std::max(largest, error.abs().max().item<double>());
      count += expected.numel();
    }
  }
  const double size = std::sqrt(squares / count), rms = std::sqrt(error_squares / count) / size;
  RecordProperty("rms", std::to_string(rms));
  RecordProperty("largest", std::to_string(largest / size));
  EXPECT_GT(rms, 1e-4) << "nothing was rounded";
  EXPECT_LT(rms, 0.01);
  EXPECT_LT(largest / size, 0.1);
}

INSTANTIATE_TEST_SUITE_P(Law1, FullOfInt8,
                         ::testing::Values("mha", "gqa", "mqa", "tied", "wide", "sample"));

// ---------------------------------------------------------------------------------------------
// Law 4: a batch of sixteen requests under sixteen policies gives each what it gives it alone.

constexpr int kBatch = 16;

// As they are by default; those that only evaluations can use are not among them.
std::vector<PolicyCase> ProductionPolicies() {
  std::vector<PolicyCase> cases;
  for (const PolicySpec* spec : AllPolicies()) {
    if (spec->evaluation_only) continue;
    cases.push_back({Camel(spec->name), std::string(spec->name), SmallParams(*spec)});
  }
  return cases;
}

std::string ToString(const std::vector<EvictionTrace>& evictions) {
  std::string text;
  for (const EvictionTrace& trace : evictions) {
    absl::StrAppend(&text, "at ", trace.at_token, ":");
    for (const EvictionTrace::Victims& victims : trace.victims) {
      absl::StrAppend(&text, " (", victims.layer.value_or(-1), ", ", victims.head.value_or(-1),
                      ") ", absl::StrJoin(victims.index, " "));
    }
    absl::StrAppend(&text, "\n");
  }
  return text;
}

// Model, and which sixteen.
class SixteenPolicies : public ::testing::TestWithParam<std::tuple<const char*, int>> {};

TEST_P(SixteenPolicies, Law4_OneBatchGivesEachWhatItGetsAlone) {
  const auto [model, batch] = GetParam();
  EngineHarness harness(ModelPath(model), {.deterministic = true, .end_tokens = false});
  const std::vector<PolicyCase> all = ProductionPolicies();
  std::mt19937_64 rng(53 + batch);
  std::vector<RequestOptions> asked;
  std::set<std::string> policies;
  for (int i = 0; i < kBatch; ++i) {
    const PolicyCase& policy = all[(batch * kBatch + i) % all.size()];
    policies.insert(policy.policy);
    RequestOptions options;
    options.prompt = Text(harness.manifest(), 20 + rng() % 30, rng());
    options.stop.max_output_tokens = 120 + rng() % 40;
    options.sampling = {.temperature = 0.8f, .seed = rng()};
    options.output.logprobs = true;
    options.output.residual_steps = true;  // bits of every layer
    asked.push_back(WithPolicy(options, policy, policy.policy == "full" ? 256 : 80));
  }
  ASSERT_EQ(static_cast<int>(policies.size()), kBatch);
  std::vector<Transcript> alone;
  for (const RequestOptions& options : asked) {
    alone.push_back(harness.Run(options));
    if (options.kv.policy == "full" || options.kv.policy == "quest") continue;
    ASSERT_TRUE(Evicted(alone.back(), harness.manifest())) << options.kv.policy;
  }
  std::vector<std::shared_ptr<Transcript>> together;
  for (const RequestOptions& options : asked) together.push_back(harness.Submit(options));
  int64_t steps_of_all = 0;
  harness.OnStep([&] { steps_of_all += harness.engine().running() == kBatch ? 1 : 0; });
  harness.RunAll();
  EXPECT_GT(steps_of_all, 100);
  for (int i = 0; i < kBatch; ++i) {
    SCOPED_TRACE(asked[i].kv.policy);
    ASSERT_TRUE(together[i]->ok()) << together[i]->finished->status;
    EXPECT_EQ(together[i]->tokens, alone[i].tokens);
    EXPECT_EQ(together[i]->logprobs, alone[i].logprobs);
    EXPECT_EQ(together[i]->residual_steps, alone[i].residual_steps);
    EXPECT_EQ(ToString(together[i]->evictions), ToString(alone[i].evictions));
    EXPECT_EQ(together[i]->finished->kv.kept, alone[i].finished->kv.kept);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Laws, SixteenPolicies,
    ::testing::Combine(
        ::testing::Values("gqa", "sample", "gqa_bf16", "gqa_fp16"),
        ::testing::Range(0, (static_cast<int>(ProductionPolicies().size()) + kBatch - 1) / kBatch)),
    [](const auto& info) {
      return absl::StrCat(std::get<0>(info.param), "_batch_", std::get<1>(info.param));
    });

// Greedy tokens under bias, penalties and a mask are those of the executor's own logits.
TEST(Sampling, TheExecutorGivesTheSamplerWhatItAsksFor) {
  EngineHarness harness(ModelPath("gqa"));
  RequestOptions options;
  options.prompt = Text(harness.manifest(), 20, 62);
  options.stop.max_output_tokens = 30;
  options.stop.min_output_tokens = 30;
  options.sampling = {.repetition_penalty = 1.7f,
                      .frequency_penalty = 0.4f,
                      .presence_penalty = 0.3f,
                      .logit_bias = {{3, 2.0f}, {9, -4.0f}}};
  options.output.logprobs = true;
  harness.model().TakeLogits();
  const Transcript transcript = harness.Run(options);
  ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
  ASSERT_EQ(transcript.tokens.size(), 30u);
  const std::vector<at::Tensor> rows = harness.model().TakeLogits();
  ASSERT_EQ(rows.size(), 30u);
  bool differs = false;
  for (size_t i = 0; i < rows.size(); ++i) {
    const at::Tensor row = rows[i].contiguous();
    const absl::Span<const float> logits(row.const_data_ptr<float>(), row.numel());
    const Draw draw{.index = i,
                    .prompt = options.prompt,
                    .outputs = absl::MakeConstSpan(transcript.tokens).first(i),
                    .masked = harness.manifest().eos_tokens};
    EXPECT_EQ(transcript.tokens[i], *Sample(logits, options.sampling, draw));
    differs |= transcript.tokens[i] != *Argmax(logits);
    // Of the raw logits.
    EXPECT_EQ(transcript.logprobs[i], LogprobsOf(logits, transcript.tokens[i])->of_token);
  }
  EXPECT_TRUE(differs) << "the settings change nothing";
}

// ---------------------------------------------------------------------------------------------
// Law 6: dropping what attention does not look at changes nothing.

class OfKvDType : public ::testing::TestWithParam<KvDType> {};

INSTANTIATE_TEST_SUITE_P(Laws, OfKvDType, ::testing::Values(KvDType::kModel, KvDType::kInt8),
                         [](const auto& info) {
                           return info.param == KvDType::kInt8 ? "Int8" : "Model";
                         });

TEST_P(OfKvDType, Law6_DroppingTokensWithoutAttentionChangesNothing) {
  EngineHarness harness(ModelPath("gqa"), {.kv_dtype = GetParam()});
  // Without rotation, channel 0 decides: a doomed token's key is far below every other.
  constexpr float kDepth = 20;  // exp(-20 * 20 * scale) of the mass
  const int64_t last_channel = harness.manifest().layers[0].key_width / 2 - 1;
  RequestOptions options = Scoring(harness.manifest(), 24, 150, 41);
  std::vector<int64_t> kept;
  std::vector<int32_t> tokens = options.prompt;
  tokens.insert(tokens.end(), options.forced.begin(), options.forced.end());
  auto doomed = [](int64_t token) { return token % 2 == 0; };
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (!doomed(tokens[i])) kept.push_back(static_cast<int64_t>(i));
  }
  // The slowest-turning pair of channels: at these lengths its angle stays small.
  harness.model().SetMeddle(
      [&](const at::Tensor& ids, at::Tensor& q, at::Tensor& k, at::Tensor&, int64_t) {
        for (int64_t channel : {last_channel, 2 * last_channel + 1}) {
          q.select(2, channel).zero_();
          k.select(2, channel).zero_();
        }
        q.select(2, last_channel).fill_(kDepth);
        for (int64_t row = 0; row < ids.size(0); ++row) {
          if (doomed(ids[row].item<int64_t>()))
            k.select(0, row).select(1, last_channel).fill_(-kDepth);
        }
      });
  ASSERT_TRUE(harness.Run(options).ok());
  const std::vector<at::Tensor> full = harness.model().TakeLogits();
  const Transcript transcript =
      harness.Run(WithPolicy(options, {"", "oracle", {{"prefer", kept}}}, 120));
  ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
  EXPECT_GE(transcript.finished->kv.rounds, 5);
  EXPECT_GE(transcript.finished->kv.evicted_entries, 50);
  // Sums in another order may round an element to the next integer.
  const double tolerance = GetParam() == KvDType::kInt8 ? 1e-3 : 1e-4;
  EXPECT_LT(LargestDifference(full, harness.model().TakeLogits()), tolerance);
  // And it is not because nothing matters: dropping the others shows.
  std::vector<int64_t> wrong;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (doomed(tokens[i])) wrong.push_back(static_cast<int64_t>(i));
  }
  ASSERT_TRUE(harness.Run(WithPolicy(options, {"", "oracle", {{"prefer", wrong}}}, 120)).ok());
  EXPECT_GT(LargestDifference(full, harness.model().TakeLogits()), 1e-2);
}

// ---------------------------------------------------------------------------------------------
// Law 7: when every request has ended, however it ended, the pool is whole.

TEST_P(OfKvDType, Law7_ThePoolIsWholeHoweverRequestsEnd) {
  EngineHarness harness(
      ModelPath("gqa"),
      {.kv_pool_bytes = 2 << 20, .kv_dtype = GetParam(), .policies = LawPolicies()});
  const std::vector<PolicyCase> policies = EvictingPolicies();
  std::mt19937_64 rng(43);
  std::vector<std::shared_ptr<Transcript>> transcripts;
  int64_t cancelled = 0;
  for (int i = 0; i < 300; ++i) {
    RequestOptions options;
    options.id = absl::StrCat("r", i);
    options.prompt = Text(harness.manifest(), 1 + rng() % 60, rng());
    options.stop.max_output_tokens = 1 + rng() % 80;
    options.sampling = {.temperature = 1.0f, .seed = rng()};
    if (rng() % 4 > 0) options = WithPolicy(options, policies[rng() % policies.size()], 160);
    if (rng() % 8 == 0) options.deadline = absl::Now() + absl::Microseconds(rng() % 2000);
    transcripts.push_back(harness.Submit(options));
    for (uint64_t steps = rng() % 4; steps > 0; --steps) harness.engine().Step();
    if (rng() % 3 == 0) {
      cancelled += harness.engine().Cancel(absl::StrCat("r", rng() % (i + 1)),
                                           absl::CancelledError("by the test"))
                       ? 1
                       : 0;
    }
  }
  harness.RunAll();
  EXPECT_GT(cancelled, 10);
  for (const auto& transcript : transcripts) EXPECT_TRUE(transcript->finished.has_value());
  EXPECT_EQ(harness.executor().used_bytes(), 0);
  EXPECT_EQ(harness.engine().ledger().reserved(), 0);
  EXPECT_EQ(harness.executor().pool().free_rows(), harness.executor().pool().num_rows());
}

// ---------------------------------------------------------------------------------------------
// Law 8: the whole engine in `compact` against the EpiKV authors' classes in a loop of their
// benchmark's kind over transformers (golden/make_epikv_runs.py): the same tokens dropped at every
// step, the same logits.

TEST(Law8, CompactEnginesEqualTheAuthorsLoop) {
  const nlohmann::json& golden = AuthorsRuns();
  EngineHarness harness(ModelPath("sample"));
  ASSERT_EQ(harness.manifest().name, golden["model"].get<std::string>()) << "make the golden again";
  ASSERT_GE(golden["runs"].size(), 4u);
  for (const auto& run : golden["runs"]) {
    const std::string policy = run["policy"];
    SCOPED_TRACE(absl::StrCat(policy, ", budget ", run["budget"].get<int64_t>()));
    RequestOptions options;
    options.prompt = run["prompt"].get<std::vector<int32_t>>();
    options.forced = run["tokens"].get<std::vector<int32_t>>();
    options.forced.push_back(0);  // the last one is not cached
    PolicyCase asked{"", policy, {}};
    for (const auto& [name, value] : run["params"].items()) {
      if (value.is_string()) asked.params[name] = value.get<std::string>();
      if (value.is_number_integer()) asked.params[name] = value.get<int64_t>();
    }
    options = WithPolicy(options, asked, run["budget"]);
    options.kv.positions = PositionMode::kCompact;
    options.kv.protection.prompt = policy == "epikv_flat";
    options.kv.protection.sinks = run["sinks"];
    options.kv.protection.recent = run["recent"];
    const Transcript transcript = harness.Run(options);
    ASSERT_TRUE(Evicted(transcript, harness.manifest()));

    const int64_t prompt = static_cast<int64_t>(options.prompt.size());
    std::map<int64_t, std::vector<int32_t>> dropped, expected;
    for (const EvictionTrace& trace : transcript.evictions) {
      dropped[trace.at_token] = trace.victims.at(0).index;
    }
    // The request ends with its last token, which needs no round.
    for (size_t step = 0; step + 1 < run["dropped"].size(); ++step) {
      const std::vector<int32_t> victims = run["dropped"][step];
      if (!victims.empty()) expected[prompt + static_cast<int64_t>(step)] = victims;
    }
    EXPECT_EQ(dropped, expected);
    const std::vector<at::Tensor> logits = harness.model().TakeLogits();
    for (const auto& [token, values] : run["logits"].items()) {
      const at::Tensor theirs = at::tensor(values.get<std::vector<float>>());
      const at::Tensor& ours = logits[std::stoll(token) - prompt + 1];
      EXPECT_LT((ours - theirs).abs().max().item<float>(), 1e-4) << "after token " << token;
    }
  }
}

}  // namespace laws_test
}  // namespace epikv
