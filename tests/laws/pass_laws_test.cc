// Scratch passes: what is told ahead is what the model would say over the draft, and segments are
// read as if they followed the prompt. Nothing of them stays but what the policy was shown, they
// are reserved, and who cancels in the middle leaves nothing behind.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <stdexcept>

#include "policies/select.h"
#include "runtime/base/reason.h"
#include "tests/fixtures/engine_harness.h"
#include "tests/fixtures/law_cases.h"
#include "tests/fixtures/law_model.h"

namespace epikv {
namespace pass_laws_test {

// What the policy below was shown of the tokens told ahead. [layers] of [m, heads, width]
std::vector<at::Tensor>* seen_ahead = nullptr;

std::vector<std::vector<int32_t>> Oldest(const CacheView& cache) {
  std::vector<std::vector<int32_t>> victims;
  for (int64_t layer = 0; layer < cache.num_layers(); ++layer) {
    for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
      std::vector<float> age;
      for (const int32_t index : cache.index(layer, head)) {
        age.push_back(static_cast<float>(index));
      }
      victims.push_back(*LowestScores(age, cache.index(layer, head), cache.protection(),
                                      cache.newest(), cache.excess(layer, head)));
    }
  }
  return victims;
}

// Drops the oldest, also from its drafts.
class Ahead final : public Policy {
 public:
  Eviction Draft(const EvictionTask& task) const override {
    return {.victims = Oldest(task.cache)};
  }
  std::vector<Eviction> Evict(absl::Span<EvictionTask> tasks) const override {
    std::vector<Eviction> evictions;
    for (const EvictionTask& task : tasks) {
      for (int64_t layer = 0; layer < task.cache.num_layers() && seen_ahead != nullptr; ++layer) {
        const at::Tensor rows = task.cache.lookahead(layer);
        if (rows.size(0) > 0) seen_ahead->push_back(rows);
      }
      evictions.push_back({.victims = Oldest(task.cache)});
    }
    return evictions;
  }
};

constexpr ParamSpec kAheadParams[] = {
    {.name = "ahead", .type = ParamType::kInt, .fallback = int64_t{5}, .max = 64, .help = ""},
    SlackParam(0)};
const PolicySpec kAhead{
    .name = "ahead",
    .params = kAheadParams,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.granularity = Granularity::kHead,
                              .signals = Signal::kKeys | Signal::kQueries,
                              .window = 4,
                              .prompt = PromptEviction::kAtEnd,
                              .pass = {.lookahead = params.Int("ahead"), .drafts = true},
                              .published = {.prompt = false, .recent = 4}};
        },
    .make = [](const Params&, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Ahead>();
    },
};
const PolicySpec* const kCatalog[] = {&kAhead};

RequestOptions Options(const Manifest& manifest, int64_t prompt, int64_t budget, int64_t ahead) {
  RequestOptions options;
  options.prompt = Text(manifest, prompt, 3);
  options.stop.max_output_tokens = 40;
  options.sampling.temperature = 0.0f;
  options.output.logprobs = options.output.kv_trace = options.output.kept = true;
  options.kv.policy = "ahead";
  options.kv.budget = budget;
  options.kv.params = {{"ahead", ahead}};
  return options;
}

std::vector<std::vector<int32_t>> VictimsOf(const Transcript& transcript) {
  std::vector<std::vector<int32_t>> victims;
  for (const EvictionTrace& trace : transcript.evictions) {
    for (const EvictionTrace::Victims& of_lane : trace.victims) victims.push_back(of_lane.index);
  }
  return victims;
}

struct Place {
  const char* model;
  bool device_path = false;
  KvDType kv_dtype = KvDType::kModel;
};
class Lookahead : public testing::TestWithParam<Place> {
 protected:
  EngineHarness Harness(HarnessOptions options = {}) const {
    options.policies = kCatalog;
    options.device_path = GetParam().device_path;
    options.kv_dtype = GetParam().kv_dtype;
    return EngineHarness(ModelPath(GetParam().model), std::move(options));
  }
};

TEST_P(Lookahead, TellsWhatTheModelSaysOverTheDraft) {
  constexpr int64_t kPrompt = 60, kBudget = 32, kAheadTokens = 5;
  EngineHarness harness = Harness({.end_tokens = false});
  std::vector<at::Tensor> seen;
  seen_ahead = &seen;
  const RequestOptions options = Options(harness.manifest(), kPrompt, kBudget, kAheadTokens);
  const Transcript transcript = harness.Run(options);
  seen_ahead = nullptr;
  ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
  ASSERT_EQ(std::ssize(seen), harness.manifest().num_layers());

  std::vector<MaskedReference::Dropped> dropped;
  for (int64_t layer = 0; layer < harness.manifest().num_layers(); ++layer) {
    for (int64_t head = 0; head < harness.manifest().num_kv_heads; ++head) {
      for (int64_t token = 0; token < kPrompt - kBudget; ++token) {
        dropped.push_back({kPrompt - 1, layer, head, token});
      }
    }
  }
  std::vector<int32_t> text = options.prompt;
  std::vector<MaskedReference::Step> steps;
  for (int64_t i = 0; i <= kAheadTokens; ++i) {
    steps = MaskedReference(harness.model(), GetParam().kv_dtype).Run(text, dropped);
    text.push_back(static_cast<int32_t>(steps.back().logits.argmax().item<int64_t>()));
  }
  for (int64_t layer = 0; layer < harness.manifest().num_layers(); ++layer) {
    ASSERT_EQ(seen[layer].size(0), kAheadTokens);
    for (int64_t i = 0; i < kAheadTokens; ++i) {
      const at::Tensor expected = steps[kPrompt + i].queries[layer];
      EXPECT_TRUE(at::allclose(seen[layer][i].to(at::kFloat), expected, 1e-3,
                               GetParam().kv_dtype == KvDType::kInt8 ? 3e-2 : 1e-3))
          << "layer " << layer << ", token " << i;
    }
  }
}

TEST_P(Lookahead, LeavesNothingBehind) {
  EngineHarness harness = Harness({.end_tokens = false, .now = absl::Now});
  std::vector<Transcript> transcripts;
  for (const int64_t ahead : {0, 1, 7}) {
    transcripts.push_back(harness.Run(Options(harness.manifest(), 60, 32, ahead)));
    ASSERT_TRUE(transcripts.back().ok()) << transcripts.back().finished->status;
    EXPECT_EQ(transcripts.back().finished->timings.pass > absl::ZeroDuration(), ahead > 0);
  }
  for (const Transcript& other : transcripts) {
    EXPECT_EQ(other.tokens, transcripts[0].tokens);
    EXPECT_EQ(other.logprobs, transcripts[0].logprobs);
    EXPECT_EQ(other.finished->kv.kept, transcripts[0].finished->kv.kept);
    EXPECT_EQ(other.finished->kv.rounds, transcripts[0].finished->kv.rounds);
    EXPECT_EQ(VictimsOf(other), VictimsOf(transcripts[0]));
  }
  EXPECT_EQ(harness.executor().used_bytes(), 0);
  EXPECT_EQ(harness.executor().pool().free_rows(), harness.executor().pool().num_rows());
}

TEST_P(Lookahead, IsReserved) {
  EngineHarness harness = Harness({.end_tokens = false});
  auto demand = [&](int64_t ahead) {
    return std::get<Request>(
               harness.admission().Resolve(Options(harness.manifest(), 60, 32, ahead)))
        .demand;
  };
  const KvDemand without = demand(0), with = demand(6);
  EXPECT_TRUE(without.draft.empty());
  EXPECT_EQ(with.draft, std::vector<int64_t>(with.budget.size(), 32 + 6));
  EXPECT_EQ(with.decode_bytes, without.decode_bytes);
  // Of a prompt within the budget nobody looks ahead.
  EXPECT_TRUE(std::get<Request>(harness.admission().Resolve(Options(harness.manifest(), 30, 64, 6)))
                  .demand.draft.empty());
  int64_t most = 0;
  harness.OnStep([&] {
    EXPECT_LE(harness.executor().used_bytes(), harness.engine().ledger().reserved());
    most = std::max(most, harness.executor().used_bytes());
  });
  const Transcript transcript = harness.Run(Options(harness.manifest(), 60, 32, 6));
  EXPECT_EQ(transcript.finished->kv.peak_bytes, with.prefill_bytes);
  EXPECT_GT(most, without.prefill_bytes);
  // A pool with room for nothing else.
  EngineHarness tight = Harness({.kv_pool_bytes = with.peak_bytes(), .end_tokens = false});
  EXPECT_EQ(tight.Run(Options(harness.manifest(), 60, 32, 6)).tokens, transcript.tokens);
}

INSTANTIATE_TEST_SUITE_P(Laws, Lookahead,
                         testing::Values(Place{"gqa"}, Place{"mqa"}, Place{"bent"},
                                         Place{"gqa", true}, Place{"gqa", false, KvDType::kInt8}),
                         [](const auto& info) {
                           return std::string(info.param.model) +
                                  (info.param.device_path ? "_device" : "") +
                                  (info.param.kv_dtype == KvDType::kInt8 ? "_int8" : "");
                         });

// A model with other end tokens.
class EndsOtherwise final : public Model {
 public:
  EndsOtherwise(std::shared_ptr<const Model> model, std::vector<int32_t> ends)
      : Model({.manifest = WithEnds(model->manifest(), std::move(ends)),
               .tokenizer_json = model->tokenizer_json(),
               .device = model->device()}),
        model_(std::move(model)) {}

  at::Tensor Forward(const at::Tensor& token_ids, const at::Tensor& positions,
                     const at::Tensor& last, ForwardHooks& hooks) const override {
    return model_->Forward(token_ids, positions, last, hooks);
  }
  at::Tensor output_projection(int64_t layer) const override {
    return model_->output_projection(layer);
  }
  at::Tensor FinalNormed(const at::Tensor& residual) const override {
    return model_->FinalNormed(residual);
  }

 private:
  static Manifest WithEnds(Manifest manifest, std::vector<int32_t> ends) {
    manifest.eos_tokens = std::move(ends);
    return manifest;
  }
  const std::shared_ptr<const Model> model_;
};

TEST(PassLaws, AnEndTokenIsNotRun) {
  constexpr int64_t kPrompt = 60, kBudget = 32;
  const std::shared_ptr<const Model> model = *LoadModelFile(ModelPath("gqa"));
  std::vector<MaskedReference::Dropped> dropped;
  for (int64_t lane = 0; lane < model->manifest().num_layers() * model->manifest().num_kv_heads;
       ++lane) {
    for (int64_t token = 0; token < kPrompt - kBudget; ++token) {
      dropped.push_back({kPrompt - 1, lane / model->manifest().num_kv_heads,
                         lane % model->manifest().num_kv_heads, token});
    }
  }
  RequestOptions options = Options(model->manifest(), kPrompt, kBudget, 16);
  options.stop.ignore_end = true;
  std::vector<int32_t> text;
  // Of some prompts the model says three different tokens.
  for (uint64_t seed = 1; text.empty(); ++seed) {
    ASSERT_LT(seed, 50u);
    text = options.prompt = Text(model->manifest(), kPrompt, seed);
    for (int i = 0; i < 3; ++i) {
      const auto steps = MaskedReference(*model).Run(text, dropped);
      text.push_back(static_cast<int32_t>(steps.back().logits.argmax().item<int64_t>()));
    }
    const int32_t end = text.back();
    if (end == text[kPrompt] || end == text[kPrompt + 1]) text.clear();
  }
  EngineHarness harness(
      std::make_shared<EndsOtherwise>(model, std::vector<int32_t>{text[kPrompt + 2]}),
      {.policies = kCatalog});
  std::vector<at::Tensor> seen;
  seen_ahead = &seen;
  ASSERT_TRUE(harness.Run(options).ok());
  seen_ahead = nullptr;
  ASSERT_FALSE(seen.empty());
  EXPECT_EQ(seen[0].size(0), 2);
}

// What the policy below was shown of a segment: its tokens' queries, and the segment's keys so far.
struct Shown {
  int64_t segment, first, count;
  std::vector<at::Tensor> queries;            // [layers] of [count, heads, width]
  std::vector<std::vector<at::Tensor>> keys;  // [layers][kv_heads] of [first + count, width]
};
std::vector<Shown>* shown = nullptr;

// Has each 40 tokens of the prompt read again, behind two words; drops the oldest.
class Rereads final : public Policy {
 public:
  static constexpr int64_t kChunk = 40;
  std::vector<std::vector<int32_t>> PassSegments(absl::Span<const int32_t> prompt) const override {
    std::vector<std::vector<int32_t>> segments;
    for (size_t begin = 0; begin < prompt.size(); begin += kChunk) {
      segments.push_back({7, 8});
      const absl::Span<const int32_t> chunk = prompt.subspan(begin, kChunk);
      segments.back().insert(segments.back().end(), chunk.begin(), chunk.end());
    }
    return segments;
  }
  void ObservePass(absl::Span<PassStep> steps) const override {
    for (PassStep& step : steps) {
      if (shown == nullptr) continue;
      Shown one{.segment = step.segment, .first = step.first, .count = step.count};
      for (int64_t layer = 0; layer < step.cache.num_layers(); ++layer) {
        one.queries.push_back(step.cache.queries(layer));
        one.keys.emplace_back();
        for (int64_t head = 0; head < step.cache.num_kv_heads(); ++head) {
          one.keys.back().push_back(step.cache.scratch_keys(layer, head).clone());
        }
      }
      shown->push_back(std::move(one));
    }
  }
  std::vector<Eviction> Evict(absl::Span<EvictionTask> tasks) const override {
    std::vector<Eviction> evictions;
    for (const EvictionTask& task : tasks) evictions.push_back({.victims = Oldest(task.cache)});
    return evictions;
  }
};
const PolicySpec kRereads{
    .name = "rereads",
    .params = kAheadParams,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{
              .granularity = Granularity::kHead,
              .signals = Signal::kKeys,
              .prompt = PromptEviction::kAtEnd,
              .pass = {.chunk = params.Int("ahead") > 0 ? Rereads::kChunk : 0, .more = 2},
              .published = {.prompt = false, .recent = 4}};
        },
    .make = [](const Params&, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Rereads>();
    },
};
const PolicySpec* const kRereading[] = {&kAhead, &kRereads};

class Segments : public testing::TestWithParam<Place> {
 protected:
  EngineHarness Harness(HarnessOptions options = {}) const {
    options.policies = kRereading;
    options.device_path = GetParam().device_path;
    options.kv_dtype = GetParam().kv_dtype;
    options.end_tokens = false;
    return EngineHarness(ModelPath(GetParam().model), std::move(options));
  }
  static RequestOptions Reading(const Manifest& manifest, int64_t reads) {
    RequestOptions options = Options(manifest, 90, 32, reads);
    options.kv.policy = "rereads";
    return options;
  }
};

TEST_P(Segments, AreReadAsIfTheyFollowedThePrompt) {
  EngineHarness harness = Harness({.max_step_tokens = 17});
  std::vector<Shown> steps;
  shown = &steps;
  const RequestOptions options = Reading(harness.manifest(), 1);
  const Transcript transcript = harness.Run(options);
  shown = nullptr;
  ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
  const auto segments = Rereads().PassSegments(options.prompt);
  ASSERT_EQ(segments.size(), 3u);
  const double near = GetParam().kv_dtype == KvDType::kInt8 ? 3e-2 : 1e-3;
  size_t at = 0;
  for (int64_t s = 0; s < std::ssize(segments); ++s) {
    std::vector<int32_t> text = options.prompt;
    text.insert(text.end(), segments[s].begin(), segments[s].end());
    const auto expected = MaskedReference(harness.model(), GetParam().kv_dtype).Run(text, {});
    int64_t read = 0;
    for (; at < steps.size() && steps[at].segment == s; ++at) {
      const Shown& one = steps[at];
      ASSERT_EQ(one.first, read);
      ASSERT_LE(one.count, 17);
      read += one.count;
      for (int64_t layer = 0; layer < harness.manifest().num_layers(); ++layer) {
        ASSERT_EQ(one.queries[layer].size(0), one.count);
        for (int64_t i = 0; i < one.count; ++i) {
          const auto& step = expected[options.prompt.size() + one.first + i];
          EXPECT_TRUE(
              at::allclose(one.queries[layer][i].to(at::kFloat), step.queries[layer], near, near))
              << "segment " << s << ", layer " << layer << ", token " << one.first + i;
        }
        for (int64_t head = 0; head < harness.manifest().num_kv_heads; ++head) {
          ASSERT_EQ(one.keys[layer][head].size(0), read);
          for (int64_t i = 0; i < read; ++i) {
            const auto& step = expected[options.prompt.size() + i];
            EXPECT_TRUE(at::allclose(one.keys[layer][head][i].to(at::kFloat),
                                     step.keys[layer][head], near, near));
          }
        }
      }
    }
    EXPECT_EQ(read, std::ssize(segments[s]));
  }
  EXPECT_EQ(at, steps.size());
}

TEST_P(Segments, LeaveNothingBehindAndAreReserved) {
  EngineHarness harness = Harness({.now = absl::Now});
  const Transcript without = harness.Run(Reading(harness.manifest(), 0));
  int64_t most = 0;
  harness.OnStep([&] {
    EXPECT_LE(harness.executor().used_bytes(), harness.engine().ledger().reserved());
    most = std::max(most, harness.executor().used_bytes());
  });
  const Transcript with = harness.Run(Reading(harness.manifest(), 1));
  ASSERT_TRUE(with.ok()) << with.finished->status;
  EXPECT_EQ(with.tokens, without.tokens);
  EXPECT_EQ(with.logprobs, without.logprobs);
  EXPECT_EQ(with.finished->kv.kept, without.finished->kv.kept);
  EXPECT_EQ(VictimsOf(with), VictimsOf(without));
  EXPECT_FALSE(VictimsOf(with).empty());
  EXPECT_EQ(with.finished->kv.rounds, without.finished->kv.rounds);
  EXPECT_GT(with.finished->timings.pass, absl::ZeroDuration());
  auto demand = [&](int64_t reads) {
    return std::get<Request>(harness.admission().Resolve(Reading(harness.manifest(), reads)))
        .demand;
  };
  EXPECT_EQ(demand(1).prefill, std::vector<int64_t>(demand(0).prefill.size(), 90 + 40 + 2));
  EXPECT_LE(with.finished->kv.peak_bytes, demand(1).prefill_bytes);
  EXPECT_GT(most, demand(0).prefill_bytes);
  EXPECT_EQ(harness.executor().pool().free_rows(), harness.executor().pool().num_rows());
  EngineHarness tight = Harness({.kv_pool_bytes = demand(1).peak_bytes()});
  EXPECT_EQ(tight.Run(Reading(harness.manifest(), 1)).tokens, without.tokens);
}

INSTANTIATE_TEST_SUITE_P(Laws, Segments,
                         testing::Values(Place{"gqa"}, Place{"mqa"}, Place{"bent"},
                                         Place{"gqa", true}, Place{"gqa", false, KvDType::kInt8}),
                         [](const auto& info) {
                           return std::string(info.param.model) +
                                  (info.param.device_path ? "_device" : "") +
                                  (info.param.kv_dtype == KvDType::kInt8 ? "_int8" : "");
                         });

// Requests whose policies have passes, their prompts over their budgets; some with completions.
std::vector<PolicyCase> WhoHavePasses() {
  const std::string ahead = "lookahead";
  return {
      {"", "laq", {{"slack", int64_t{7}}}},
      {"", "laq_plus", {{"slack", int64_t{7}}, {"draft", std::string("streaming_llm")}}},
      {"", "snapkv", {{"queries", ahead}, {"window", int64_t{8}}, {"slack", int64_t{3}}}},
      {"", "rkv", {{"queries", ahead}, {"slack", int64_t{7}}}},
      {"", "laprox", {{"queries", ahead}, {"window", int64_t{8}}, {"slack", int64_t{7}}}},
      {"", "snapkv", {{"queries", ahead}, {"window", int64_t{8}}, {"draft", std::string("whole")}}},
      {"", "kvzip", {{"chunk", int64_t{32}}, {"slack", int64_t{7}}}},
      {"", "kvzip_plus", {{"slack", int64_t{7}}}}};
}

RequestOptions Drawn(const Manifest& manifest, const PolicyCase& policy, std::mt19937_64& rng) {
  RequestOptions options;
  options.prompt = Text(manifest, 70 + static_cast<int64_t>(rng() % 60), rng());
  options.stop.max_output_tokens = 20 + static_cast<int64_t>(rng() % 60);
  options.sampling = {.temperature = 1.0f, .seed = rng()};
  options.completions = 1 + static_cast<int64_t>(rng() % 3);
  options.output.logprobs = true;
  return WithPolicy(options, policy, 56);
}

// Law 4, where prompts are over their budgets: each gives in a batch with all policies what it
// gives alone, its completions included.
TEST(PassLaws, DeterministicModeIgnoresTheBatch) {
  EngineHarness harness(ModelPath("gqa"),
                        {.deterministic = true, .end_tokens = false, .now = absl::Now});
  std::mt19937_64 rng(31);
  std::vector<RequestOptions> all;
  for (const PolicyCase& policy : WhoHavePasses()) {
    for (int i = 0; i < 2; ++i) all.push_back(Drawn(harness.manifest(), policy, rng));
  }
  for (const PolicyCase& policy : EvictingPolicies()) {
    if (FindPolicy(AllPolicies(), policy.policy) == nullptr) continue;
    RequestOptions options = Drawn(harness.manifest(), policy, rng);
    options = WithPolicy(options, policy, 160);  // some cannot evict a prompt
    all.push_back(options);
  }
  std::vector<Transcript> alone;
  for (const RequestOptions& options : all) {
    alone.push_back(harness.Run(options));
    ASSERT_TRUE(alone.back().ok()) << alone.back().finished->status;
  }
  std::vector<std::shared_ptr<Transcript>> together;
  for (const RequestOptions& options : all) {
    together.push_back(harness.Submit(options));
    for (uint64_t steps = rng() % 4; steps > 0; --steps) harness.engine().Step();
  }
  harness.RunAll();
  const size_t passing = 2 * WhoHavePasses().size();
  for (size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(all[i].kv.policy);
    EXPECT_EQ(alone[i].finished->timings.pass > absl::ZeroDuration(), i < passing);
    ASSERT_TRUE(together[i]->ok()) << together[i]->finished->status;
    EXPECT_EQ(together[i]->finished->kv.kept, alone[i].finished->kv.kept);
    ASSERT_EQ(together[i]->completions.size(), alone[i].completions.size());
    for (size_t c = 0; c < alone[i].completions.size(); ++c) {
      EXPECT_EQ(together[i]->completions[c].tokens, alone[i].completions[c].tokens);
      EXPECT_EQ(together[i]->completions[c].logprobs, alone[i].completions[c].logprobs);
    }
    if (!alone[i].completions.empty()) continue;
    EXPECT_EQ(together[i]->tokens, alone[i].tokens);
    EXPECT_EQ(together[i]->logprobs, alone[i].logprobs);
  }
  EXPECT_EQ(harness.executor().pool().free_rows(), harness.executor().pool().num_rows());
}

// A thousand requests are cancelled while their passes run.
TEST(PassLaws, CancelsLeaveThePoolWhole) {
  EngineHarness harness(ModelPath("gqa"), {.end_tokens = false});
  std::mt19937_64 rng(37);
  int64_t in_pass = 0, cancelled = 0;
  std::vector<std::shared_ptr<Transcript>> transcripts;
  for (int i = 0; cancelled < 1000; ++i) {
    ASSERT_LT(i, 3000);
    const std::vector<PolicyCase> policies = WhoHavePasses();
    RequestOptions options = Drawn(harness.manifest(), policies[i % policies.size()], rng);
    options.prompt.resize(70);
    options.id = absl::StrCat("r", i);
    transcripts.push_back(harness.Submit(options));
    // One step reads the prompt and makes the copy; then eight tokens are told ahead.
    const uint64_t steps = 1 + rng() % 9;
    for (uint64_t step = 0; step < steps; ++step) harness.engine().Step();
    // Without a pass there would be a second token by now.
    for (const RequestFacts& facts : harness.engine().Describe()) {
      if (facts.id == options.id) in_pass += steps > 1 && facts.output_tokens == 1 ? 1 : 0;
    }
    cancelled += harness.engine().Cancel(options.id, absl::CancelledError("by the test")) ? 1 : 0;
    if (i % 50 != 0) continue;
    harness.RunAll();
    ASSERT_EQ(harness.executor().used_bytes(), 0);
    ASSERT_EQ(harness.engine().ledger().reserved(), 0);
    ASSERT_EQ(harness.executor().pool().free_rows(), harness.executor().pool().num_rows());
  }
  harness.RunAll();
  for (const auto& transcript : transcripts) EXPECT_TRUE(transcript->finished.has_value());
  EXPECT_GT(in_pass, 400);
  EXPECT_EQ(harness.executor().used_bytes(), 0);
  EXPECT_EQ(harness.engine().ledger().reserved(), 0);
  EXPECT_EQ(harness.executor().pool().free_rows(), harness.executor().pool().num_rows());
}

// A draft that keeps too much, or names what is not there, is the policy's fault and ends its
// request alone.
class BadDraft final : public Policy {
 public:
  explicit BadDraft(int64_t fault) : fault_(fault) {}
  Eviction Draft(const EvictionTask& task) const override {
    std::vector<std::vector<int32_t>> victims = Oldest(task.cache);
    if (fault_ == 0) victims[0].pop_back();
    if (fault_ == 1) victims[1][0] = 9999;
    if (fault_ == 2) return {.status = absl::InternalError("no idea")};
    if (fault_ == 3) throw std::runtime_error("a draft went wrong");
    return {.victims = std::move(victims)};
  }
  std::vector<Eviction> Evict(absl::Span<EvictionTask> tasks) const override {
    return std::vector<Eviction>(tasks.size());
  }

 private:
  const int64_t fault_;
};
const PolicySpec kBadDraft{
    .name = "bad_draft",
    .params = kAheadParams,
    .traits = kAhead.traits,
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<BadDraft>(params.Int("slack"));
    },
};

TEST(PassLaws, ABadDraftEndsItsRequestAlone) {
  static const PolicySpec* const kBad[] = {&kAhead, &kBadDraft};
  EngineHarness harness(ModelPath("gqa"),
                        {.deterministic = true, .policies = kBad, .end_tokens = false});
  const Transcript alone = harness.Run(Options(harness.manifest(), 60, 32, 5));
  for (const int64_t fault : {0, 1, 2, 3}) {
    RequestOptions options = Options(harness.manifest(), 60, 32, 5);
    options.kv.policy = "bad_draft";
    options.kv.params["slack"] = fault;
    const auto bad = harness.Submit(options);
    const auto good = harness.Submit(Options(harness.manifest(), 60, 32, 5));
    harness.RunAll();
    EXPECT_EQ(ReasonOf(bad->finished->status), kPolicyFailed) << bad->finished->status;
    EXPECT_EQ(good->tokens, alone.tokens) << fault;
    EXPECT_EQ(harness.executor().pool().free_rows(), harness.executor().pool().num_rows());
  }
}

// A prompt of so many tokens, words over and over.
std::vector<int32_t> Long(const Manifest& manifest, int64_t count) {
  const std::vector<int32_t> words = Text(manifest, 300, 9);
  std::vector<int32_t> prompt;
  while (std::ssize(prompt) < count) prompt.push_back(words[prompt.size() % words.size()]);
  return prompt;
}

// Nothing is told ahead beyond the context, and what would be read beyond it is refused.
TEST(PassLaws, EndWithTheContext) {
  EngineHarness harness(ModelPath("gqa"), {.policies = kRereading, .end_tokens = false});
  const int64_t context = harness.manifest().context_length;
  RequestOptions options = Options(harness.manifest(), 60, 32, 16);
  for (const int64_t left : {6, 1}) {
    options.prompt = Long(harness.manifest(), context - left);
    options.stop.max_output_tokens = left;
    std::vector<at::Tensor> seen;
    seen_ahead = &seen;
    const Transcript transcript = harness.Run(options);
    seen_ahead = nullptr;
    ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
    if (left > 1) {
      ASSERT_FALSE(seen.empty());
      EXPECT_EQ(seen[0].size(0), left);
    }
  }
  options.kv.policy = "rereads";
  options.prompt = Long(harness.manifest(), context - 41);
  options.stop.max_output_tokens = 2;
  const Rejection refusal = harness.Refusal(options);
  ASSERT_EQ(refusal.violations.size(), 1u);
  EXPECT_EQ(refusal.violations[0].field, "kv.policy_params.chunk");
  options.prompt.resize(context - 42);
  EXPECT_TRUE(harness.Run(options).ok());
}

}  // namespace pass_laws_test
}  // namespace epikv
