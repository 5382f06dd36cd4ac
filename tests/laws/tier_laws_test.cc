// Laws of the tier below the lanes: what is evicted can be attended to.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "policies/loops.h"
#include "tests/fixtures/engine_harness.h"
#include "tests/fixtures/law_cases.h"
#include "tests/fixtures/law_model.h"
#include "tests/fixtures/temporary_folder.h"

namespace epikv {
namespace tier_laws_test {

constexpr int64_t kTierBytes = 64 << 20;
constexpr int64_t kPrompt = 90, kForced = 60, kBudget = 32;  // several rounds in the prompt
constexpr int64_t kShort = 20, kRoomy = 40;                  // none in this prompt

RequestOptions WithTier(RequestOptions options, int64_t tokens, int64_t fetch) {
  options.kv.tier = {.tokens = tokens, .fetch = fetch};
  return options;
}

// (model, policy). "gqa_int8": K and V cached as int8.
using Tiers = EveryPolicy;

HarnessOptions Roomy() { return {.kv_tier_bytes = kTierBytes, .prefill_chunk_tokens = 16}; }

// A step's logits are those of plain attention over what is cached and what the definition fetches.
TEST_P(Tiers, StepsAreAttentionOverTheLanesAndWhatIsFetched) {
  for (const auto& [positions, tokens, fetch] :
       std::vector<std::tuple<PositionMode, int64_t, int64_t>>{
           {PositionMode::kAbsolute, 1000, 16},
           {PositionMode::kAbsolute, 40, 32},  // older ones are forgotten
           {PositionMode::kCompact, 1000, 32},
           {PositionMode::kCache, 1000, 32}}) {
    SCOPED_TRACE(::testing::Message() << tokens << " tokens, " << fetch << " fetched, positions "
                                      << static_cast<int>(positions));
    EngineHarness harness = Harness(Roomy());
    RequestOptions options =
        WithPolicy(Scoring(harness.manifest(), kPrompt, kForced, 5), policy(), kBudget);
    options.kv.positions = positions;
    options = WithTier(std::move(options), tokens, fetch);
    if (std::holds_alternative<Rejection>(harness.admission().Resolve(options))) {
      EXPECT_NE(positions, PositionMode::kAbsolute);
      continue;  // the policy has no such positions
    }
    const Transcript transcript = harness.Run(options);
    ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
    const std::vector<at::Tensor> got = harness.model().TakeLogits();
    const std::vector<int32_t> cached = CachedTokens(options);
    const MaskedReference reference(harness.model(), kv_dtype());
    const auto dropped = DroppedBy(transcript, harness.manifest());
    const auto wanted = reference.Run(cached, dropped, positions, {}, std::nullopt,
                                      MaskedReference::Tier{.tokens = tokens, .fetch = fetch});
    const auto without = reference.Run(cached, dropped, positions);
    harness.model().TakeLogits();
    double furthest = 0, from_without = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      const size_t step = cached.size() - got.size() + i;
      furthest = std::max(furthest, (got[i] - wanted[step].logits).abs().max().item<double>());
      from_without =
          std::max(from_without, (got[i] - without[step].logits).abs().max().item<double>());
    }
    EXPECT_LT(furthest, kv_dtype() == KvDType::kInt8 ? 0.1 : 2e-4);
    EXPECT_GT(from_without, 10 * furthest) << "what is fetched would be missed";
    EXPECT_GT(transcript.finished->kv.tier.fetched, 0);
    EXPECT_EQ(transcript.finished->kv.tier.forgotten > 0, tokens < 1000);
    EXPECT_FALSE(transcript.finished->kv.tier.failed);
  }
}

// A tier that holds all, of which all is fetched, is the whole cache.
TEST_P(Tiers, AllOfAWholeTierIsFull) {
  EngineHarness harness = Harness(Roomy());
  const RequestOptions plain = Scoring(harness.manifest(), kPrompt, kForced, 5);
  ASSERT_TRUE(harness.Run(plain).ok());
  const std::vector<at::Tensor> full = harness.model().TakeLogits();
  const Transcript transcript =
      harness.Run(WithTier(WithPolicy(plain, policy(), kBudget), 1000, 1000));
  ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
  EXPECT_GT(transcript.finished->kv.evicted_entries, 0);
  EXPECT_EQ(transcript.finished->kv.tier.demoted, transcript.finished->kv.evicted_entries);
  EXPECT_LT(LargestDifference(full, harness.model().TakeLogits()),
            kv_dtype() == KvDType::kInt8 ? 0.1 : 2e-4);
}

// What is rounded on its way there is off by little, and takes less.
TEST_P(Tiers, RoundedTiersAreNearlyFull) {
  EngineHarness harness = Harness(Roomy());
  const RequestOptions plain = Scoring(harness.manifest(), kPrompt, kForced, 5);
  ASSERT_TRUE(harness.Run(plain).ok());
  const std::vector<at::Tensor> full = harness.model().TakeLogits();
  int64_t bytes = std::numeric_limits<int64_t>::max();
  for (const auto& [dtype, least, most] :
       {std::tuple(TierDType::kPool, 0., 2e-4), std::tuple(TierDType::kInt8, 0., .2),
        std::tuple(TierDType::kInt4, 1e-6, 3.)}) {
    RequestOptions options = WithTier(WithPolicy(plain, policy(), kBudget), 1000, 1000);
    options.kv.tier.dtype = dtype;
    const Transcript transcript = harness.Run(options);
    ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
    const double off = LargestDifference(full, harness.model().TakeLogits());
    EXPECT_GE(off, least);
    EXPECT_LT(off, kv_dtype() == KvDType::kInt8 ? most + .1 : most);
    EXPECT_LE(transcript.finished->kv.tier.bytes, bytes);
    bytes = transcript.finished->kv.tier.bytes;
  }
}

// A tier from which nothing is read changes no bit.
TEST_P(Tiers, WhatIsOnlyKeptChangesNothing) {
  EngineHarness harness = Harness(Roomy());
  const RequestOptions options =
      WithPolicy(Scoring(harness.manifest(), kPrompt, kForced, 5), policy(), kBudget);
  ASSERT_TRUE(harness.Run(options).ok());
  const std::vector<at::Tensor> plain = harness.model().TakeLogits();
  const Transcript transcript = harness.Run(WithTier(options, 50, 0));
  ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
  EXPECT_TRUE(SameBits(plain, harness.model().TakeLogits()));
  const TierUsage& tier = transcript.finished->kv.tier;
  EXPECT_EQ(tier.demoted, transcript.finished->kv.evicted_entries);
  EXPECT_GT(tier.forgotten, 0);
}

// The entropies of the tokens that come next, forward by forward.
std::vector<double> Entropies(const std::vector<at::Tensor>& logits) {
  std::vector<double> entropies;
  for (const at::Tensor& of : logits) {
    entropies.push_back(Entropy({of.const_data_ptr<float>(), static_cast<size_t>(of.numel())}));
  }
  return entropies;
}

// So much doubt that about half of the steps leave more.
double MedianEntropy(EngineHarness& harness, const RequestOptions& options) {
  harness.model().TakeLogits();
  EXPECT_TRUE(harness.Run(options).ok());
  std::vector<double> entropies = Entropies(harness.model().TakeLogits());
  std::nth_element(entropies.begin(), entropies.begin() + std::ssize(entropies) / 2,
                   entropies.end());
  return entropies[entropies.size() / 2];
}

// A step runs a second time if and only if its first run leaves more doubt than is allowed, while
// something lies in the tier.
TEST_P(Tiers, StepsInDoubtRunAgain) {
  EngineHarness harness = Harness(Roomy());
  RequestOptions options =
      WithPolicy(Scoring(harness.manifest(), kShort, kForced, 5), policy(), kRoomy);
  options.kv.tier = {.tokens = 1000, .fetch = 1000, .doubt = MedianEntropy(harness, options)};
  const int64_t slack = std::get<epikv::Request>(harness.admission().Resolve(options)).traits.slack;
  const Transcript transcript = harness.Run(options);
  ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
  const std::vector<double> entropies = Entropies(harness.model().TakeLogits());
  int64_t steps = 1, again = 0;  // the first forward reads the prompt, which fits
  for (size_t i = 1; i < entropies.size(); ++i, ++steps) {
    const bool evicted = kShort + steps - 1 > kRoomy + slack;
    if (!evicted || entropies[i] <= options.kv.tier.doubt) continue;
    ++again;
    ++i;
  }
  EXPECT_EQ(steps, kForced);
  EXPECT_EQ(transcript.finished->kv.tier.doubted_steps, again);
  EXPECT_GT(again, 0);
  EXPECT_LT(again, kForced - (kRoomy - kShort));
}

// All but how many steps ran twice.
void ExpectAlike(const Transcript& got, const Transcript& wanted) {
  EXPECT_EQ(got.logprobs, wanted.logprobs);
  const KvUsage &a = got.finished->kv, &b = wanted.finished->kv;
  EXPECT_EQ(a.kept, b.kept);
  EXPECT_EQ(a.rounds, b.rounds);
  EXPECT_EQ(a.evicted_entries, b.evicted_entries);
  EXPECT_EQ(a.peak_entries, b.peak_entries);
  EXPECT_EQ(a.tier.demoted, b.tier.demoted);
  EXPECT_EQ(a.tier.recalled, b.tier.recalled);
  EXPECT_EQ(a.tier.fetched, b.tier.fetched);
  EXPECT_EQ(a.reads.read, b.reads.read);
  EXPECT_EQ(a.reads.cached, b.reads.cached);
}

// With the least doubt each step attends to the tier, and leaves what it leaves without that limit;
// with the most, none does.
void ExpectDoubtBetweenAlwaysAndNever(EngineHarness& harness, const RequestOptions& plain) {
  auto run = [&](int64_t fetch, double doubt) {
    RequestOptions options = plain;
    options.kv.tier.tokens = 1000;
    options.kv.tier.fetch = fetch;
    options.kv.tier.doubt = doubt;
    options.output.logprobs = options.output.kept = true;
    Transcript transcript = harness.Run(options);
    EXPECT_TRUE(transcript.ok()) << transcript.finished->status;
    return transcript;
  };
  const Transcript always = run(1000, 1e-30), never = run(1000, 1e9);
  ExpectAlike(always, run(1000, 0));
  ExpectAlike(never, run(0, 0));
  EXPECT_NE(always.logprobs, never.logprobs);
  EXPECT_GT(always.finished->kv.tier.doubted_steps, 0);
  EXPECT_EQ(never.finished->kv.tier.doubted_steps, 0);
  EXPECT_EQ(never.finished->kv.tier.fetched, 0);
}

TEST_P(Tiers, DoubtIsBetweenAlwaysAndNever) {
  EngineHarness harness = Harness(Roomy());
  RequestOptions plain =
      WithPolicy(Scoring(harness.manifest(), kShort, kForced, 5), policy(), kRoomy);
  for (const PositionMode positions : {PositionMode::kAbsolute, PositionMode::kCompact}) {
    plain.kv.positions = positions;
    ExpectDoubtBetweenAlwaysAndNever(harness, plain);
  }
}

// A step that runs twice counts once in what is read of the lanes.
TEST_P(Tiers, DoubtIsBetweenAlwaysAndNeverWhereAPartIsRead) {
  EngineHarness harness = Harness(Roomy());
  RequestOptions plain = WithPolicy(Scoring(harness.manifest(), 30, 100, 5), policy(), 80);
  plain.kv.read_tokens = 48;
  ExpectDoubtBetweenAlwaysAndNever(harness, plain);
}

// (model, policy): of those that measure something in each forward, of which the first leaves
// nothing.
using Measuring = EveryPolicy;

TEST_P(Measuring, DoubtIsBetweenAlwaysAndNever) {
  EngineHarness harness = Harness(Roomy());
  ExpectDoubtBetweenAlwaysAndNever(
      harness, WithPolicy(Scoring(harness.manifest(), kShort, kForced, 5), policy(), kRoomy));
}

INSTANTIATE_TEST_SUITE_P(
    Models, Measuring,
    ::testing::Combine(::testing::Values("gqa"),
                       ::testing::ValuesIn(std::vector<PolicyCase>{
                           {"snapkv", "snapkv", {{"window", int64_t{8}}, {"slack", int64_t{7}}}},
                           {"expected_attention", "expected_attention", {{"slack", int64_t{7}}}},
                           {"infokv", "infokv", {{"window", int64_t{8}}, {"slack", int64_t{7}}}},
                           {"skipkv", "skipkv", {{"slack", int64_t{7}}}},
                           {"kvzap", "kvzap", {{"slack", int64_t{7}}}},
                           {"epikv_flat", "epikv_flat", {}},
                           {"epikv_forecast", "epikv_forecast", {{"slack", int64_t{7}}}},
                           {"rkv", "rkv", {{"slack", int64_t{7}}}},
                           {"tova", "tova", {}}})),
    CaseName);

// Beside others, in memory or in a file, in several completions: what is fetched is its own.
TEST_P(Tiers, DoNotDependOnNeighbours) {
  const TemporaryFolder folder;
  double doubt = 0;
  auto run = [&](bool beside) {
    HarnessOptions how = Roomy();
    how.prefill_chunk_tokens = 32;
    how.deterministic = true;
    if (beside) how.open_tier = TiersIn(folder.File(""));
    if (beside) how.max_step_tokens = 37;
    EngineHarness harness = Harness(std::move(how));
    RequestOptions options;
    options.prompt = Text(harness.manifest(), 80, 3);
    options.stop = {.max_output_tokens = 40, .ignore_end = true};
    options.output.logprobs = true;
    options.sampling = {.temperature = 1.0f, .seed = 5};
    options.completions = 2;
    options = WithTier(WithPolicy(std::move(options), policy(), kBudget), 60, 32);
    options.kv.tier.doubt = doubt;
    if (beside) {  // in doubt at other steps, and so in the same second forwards now and then
      RequestOptions other =
          WithTier(WithPolicy(Scoring(harness.manifest(), 90, 30, 9), policy(), kBudget), 100, 16);
      other.kv.tier.doubt = doubt;
      harness.Submit(std::move(other));
      harness.Submit(Scoring(harness.manifest(), 50, 50, 4));
    }
    Transcript transcript = harness.Run(options);
    EXPECT_TRUE(transcript.ok()) << transcript.finished->status;
    return transcript;
  };
  auto compare = [&] {
    const Transcript alone = run(false), beside = run(true);
    for (size_t i = 0; i < alone.completions.size(); ++i) {
      EXPECT_EQ(alone.completions[i].tokens, beside.completions[i].tokens) << i;
      EXPECT_EQ(alone.completions[i].logprobs, beside.completions[i].logprobs) << i;
    }
    EXPECT_NE(alone.completions[0].tokens, alone.completions[1].tokens);
    EXPECT_EQ(alone.finished->kv.tier.doubted_steps, beside.finished->kv.tier.doubted_steps);
    return alone.finished->kv.tier.doubted_steps;
  };
  EXPECT_EQ(compare(), 0);
  EngineHarness harness = Harness(Roomy());
  doubt = MedianEntropy(harness, Scoring(harness.manifest(), 40, 40, 3));
  EXPECT_GT(compare(), 0);
}

const std::vector<PolicyCase> kCases = {
    {"streaming_llm", "streaming_llm", {}},  // one slot table
    {"random", "random", {}},
    {"knorm", "knorm", {}},  // a table for each lane
    {"h2o", "h2o", {}},      // reads attention
};

INSTANTIATE_TEST_SUITE_P(Models, Tiers,
                         ::testing::Combine(::testing::Values("gqa", "mha", "gqa_int8"),
                                            ::testing::ValuesIn(kCases)),
                         CaseName);

// (model, policy)
class Guards : public EveryPolicy {
 protected:
  RequestOptions Guarded(RequestOptions options, int64_t tokens, int64_t asked) const {
    options = WithTier(WithPolicy(std::move(options), policy(), kBudget), tokens, 0);
    options.kv.tier.guard = GuardRule{.asked = asked};
    return options;
  }
};

// The guard's queries and the second run's go their own ways.
TEST_P(Guards, DoubtIsBetweenAlwaysAndNever) {
  EngineHarness harness = Harness(Roomy());
  ExpectDoubtBetweenAlwaysAndNever(harness,
                                   Guarded(Scoring(harness.manifest(), kShort, kForced, 5), 60, 8));
}

// What comes back is attended to as if it had never gone.
TEST_P(Guards, StepsAreAttentionOverWhatIsKeptAndCameBack) {
  EngineHarness harness = Harness(Roomy());
  const RequestOptions options = Guarded(Scoring(harness.manifest(), kPrompt, kForced, 5), 60, 8);
  const Transcript transcript = harness.Run(options);
  ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
  const std::vector<at::Tensor> got = harness.model().TakeLogits();
  const std::vector<int32_t> cached = CachedTokens(options);
  const MaskedReference reference(harness.model(), kv_dtype());
  std::vector<MaskedReference::Dropped> dropped = DroppedBy(transcript, harness.manifest());
  const auto wanted = reference.Run(cached, dropped);
  std::erase_if(dropped, [](const auto& of) { return of.back; });
  const auto without = reference.Run(cached, dropped);
  harness.model().TakeLogits();
  double furthest = 0, from_without = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const size_t step = cached.size() - got.size() + i;
    furthest = std::max(furthest, (got[i] - wanted[step].logits).abs().max().item<double>());
    from_without =
        std::max(from_without, (got[i] - without[step].logits).abs().max().item<double>());
  }
  EXPECT_LT(furthest, kv_dtype() == KvDType::kInt8 ? 0.1 : 2e-4);
  EXPECT_GT(from_without, 10 * furthest) << "what came back would be missed";
  EXPECT_GT(transcript.finished->kv.tier.recalled, 0);
}

// Recalls keep to the budget, spare the protected, and are of tokens that had gone.
TEST_P(Guards, KeepToTheBudget) {
  EngineHarness harness = Harness(Roomy());
  const RequestOptions options = Guarded(Scoring(harness.manifest(), kPrompt, kForced, 11), 60, 16);
  const auto request = std::get<epikv::Request>(harness.admission().Resolve(options));
  const auto transcript = harness.Submit(options);
  harness.OnStep(
      [&] { EXPECT_LE(harness.executor().used_bytes(), harness.engine().ledger().reserved()); });
  harness.RunAll();
  ASSERT_TRUE(transcript->ok()) << transcript->finished->status;
  std::map<std::pair<int64_t, int64_t>, std::set<int64_t>> gone;  // by lane
  for (const MaskedReference::Dropped& d : DroppedBy(*transcript, harness.manifest())) {
    std::set<int64_t>& of_lane = gone[{d.layer, d.head}];
    if (d.back) {
      EXPECT_EQ(of_lane.erase(d.index), 1u);
      continue;
    }
    EXPECT_FALSE(request.protection.Covers(d.index, d.at_token));
    EXPECT_TRUE(of_lane.insert(d.index).second);
  }
  for (const auto& [lane, tokens] : gone) {  // the last token's round does not come
    EXPECT_LE(kPrompt + kForced - 1 - std::ssize(tokens), kBudget + request.traits.slack + 1);
  }
  EXPECT_LE(transcript->finished->kv.peak_bytes, request.demand.peak_bytes());
  EXPECT_GT(transcript->finished->kv.tier.recalled, 0);
}

// Completions go on from one guard and one tier, each alone.
TEST_P(Guards, CompletionsGoOnAlone) {
  auto run = [&](int64_t completions, uint64_t seed) {
    HarnessOptions how = Roomy();
    how.deterministic = true;
    EngineHarness harness = Harness(std::move(how));
    RequestOptions options;
    options.prompt = Text(harness.manifest(), 80, 3);
    options.stop = {.max_output_tokens = 50, .ignore_end = true};
    options.output.logprobs = true;
    options.sampling = {.temperature = 1.0f, .seed = seed};
    options.completions = completions;
    options = Guarded(std::move(options), 60, 8);
    options.kv.tier.fetch = 16;
    Transcript transcript = harness.Run(options);
    EXPECT_TRUE(transcript.ok()) << transcript.finished->status;
    EXPECT_GT(transcript.finished->kv.tier.recalled, 0);
    EXPECT_GT(transcript.finished->kv.tier.fetched, 0);
    return transcript;
  };
  const Transcript both = run(2, 5), first = run(1, 5);
  EXPECT_EQ(both.completions[0].tokens, first.tokens);
  EXPECT_EQ(both.completions[0].logprobs, first.logprobs);
  EXPECT_NE(both.completions[0].tokens, both.completions[1].tokens);
}

// A seed is an answer: chance is drawn by the request alone.
TEST_P(Guards, DoNotDependOnNeighbours) {
  auto run = [&](bool beside) {
    HarnessOptions how = Roomy();
    how.deterministic = true;
    EngineHarness harness = Harness(std::move(how));
    const RequestOptions options = Guarded(Scoring(harness.manifest(), kPrompt, kForced, 5), 60, 8);
    if (beside) harness.Submit(Guarded(Scoring(harness.manifest(), 30, 80, 9), 40, 4));
    Transcript transcript = harness.Run(options);
    EXPECT_TRUE(transcript.ok()) << transcript.finished->status;
    return transcript;
  };
  const Transcript alone = run(false), beside = run(true);
  EXPECT_EQ(alone.logprobs, beside.logprobs);
  EXPECT_EQ(alone.finished->kv.kept, beside.finished->kv.kept);
}

INSTANTIATE_TEST_SUITE_P(
    Models, Guards,
    ::testing::Combine(::testing::Values("gqa", "mha", "gqa_int8"),
                       ::testing::ValuesIn(std::vector<PolicyCase>{
                           {"streaming_llm", "streaming_llm", {}},
                           {"random", "random", {}},
                           {"knorm", "knorm", {{"slack", int64_t{7}}}},
                           {"h2o", "h2o", {}},
                           {"snapkv", "snapkv", {{"window", int64_t{8}}, {"slack", int64_t{7}}}}})),
    CaseName);

class Tier : public ::testing::Test {
 protected:
  RequestOptions Request(const EngineHarness& harness, int64_t tokens, int64_t fetch = 0) const {
    const PolicyCase random{"random", "random", {}};
    return WithTier(WithPolicy(Scoring(harness.manifest(), kPrompt, kForced, 5), random, kBudget),
                    tokens, fetch);
  }
  static int64_t BytesOf(const EngineHarness& harness, const RequestOptions& options) {
    return std::get<epikv::Request>(harness.admission().Resolve(options)).demand.peak_tier_bytes();
  }
};

// The sum of what running requests may hold never exceeds the server's, and whoever must waits.
TEST_F(Tier, IsReservedWhole) {
  const EngineHarness measure(ModelPath("gqa"), {.kv_tier_bytes = kTierBytes});
  const int64_t bytes = BytesOf(measure, Request(measure, 60));
  EngineHarness harness(ModelPath("gqa"), {.kv_tier_bytes = 2 * bytes + bytes / 2});
  std::vector<std::shared_ptr<Transcript>> transcripts;
  for (int i = 0; i < 5; ++i) transcripts.push_back(harness.Submit(Request(harness, 60)));
  int64_t most = 0;
  harness.OnStep([&] {
    most = std::max(most, harness.engine().running());
    EXPECT_LE(harness.engine().tier_ledger().reserved(), harness.engine().tier_ledger().capacity());
  });
  harness.RunAll();
  for (const auto& transcript : transcripts) ASSERT_TRUE(transcript->ok());
  EXPECT_EQ(most, 2);
  EXPECT_EQ(harness.engine().tier_ledger().reserved(), 0);
  EXPECT_EQ(transcripts.front()->finished->kv.tier.bytes, bytes);
}

// A folder that is gone, or has no room: the request goes on, and says so.
TEST_F(Tier, ThatCannotBeOpenedIsEviction) {
  EngineHarness harness(ModelPath("gqa"),
                        {.kv_tier_bytes = kTierBytes, .open_tier = TiersIn("/no/such/folder")});
  const Transcript transcript = harness.Run(Request(harness, 60, 16));
  ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
  EXPECT_TRUE(transcript.finished->kv.tier.failed);
  EXPECT_EQ(transcript.finished->kv.tier.demoted, 0);
  EXPECT_GT(transcript.finished->kv.evicted_entries, 0);
}

// A store that works so many times.
class FailingStore final : public TierStore {
 public:
  FailingStore(std::unique_ptr<TierStore> store, std::shared_ptr<std::atomic<int64_t>> left)
      : store_(std::move(store)), left_(std::move(left)) {}
  absl::Status Write(int64_t offset, const void* data, int64_t bytes) override {
    return --*left_ < 0 ? absl::DataLossError("it is broken") : store_->Write(offset, data, bytes);
  }
  absl::Status Read(int64_t offset, void* data, int64_t bytes) const override {
    return --*left_ < 0 ? absl::DataLossError("it is broken") : store_->Read(offset, data, bytes);
  }

 private:
  const std::unique_ptr<TierStore> store_;
  const std::shared_ptr<std::atomic<int64_t>> left_;
};

// Whichever operation is the first that fails: the request goes on, and says so.
TEST_F(Tier, ThatFailsMidwayIsEviction) {
  auto left = std::make_shared<std::atomic<int64_t>>(0);
  EngineHarness harness(
      ModelPath("gqa"),
      {.kv_tier_bytes = kTierBytes,
       .open_tier = [left](int64_t bytes) -> absl::StatusOr<std::unique_ptr<TierStore>> {
         auto store = OpenTierStore("", bytes);
         if (!store.ok()) return store.status();
         return std::make_unique<FailingStore>(*std::move(store), left);
       }});
  RequestOptions options = Request(harness, 60, 16);
  options.kv.tier.guard = GuardRule{.asked = 8};
  *left = int64_t{1} << 40;
  ASSERT_TRUE(harness.Run(options).ok());
  const int64_t operations = (int64_t{1} << 40) - *left;
  ASSERT_GT(operations, 10'000);
  std::mt19937 random(3);
  for (int i = 0; i < 60; ++i) {
    const int64_t works = i < 30 ? i : random() % operations;
    SCOPED_TRACE(works);
    *left = works;
    const Transcript transcript = harness.Run(options);
    ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
    EXPECT_TRUE(transcript.finished->kv.tier.failed);
    EXPECT_EQ(harness.engine().tier_ledger().reserved(), 0);
  }
}

TEST_F(Tier, RequestsThatCannotHaveOneAreRefused) {
  const EngineHarness harness(ModelPath("gqa"), {.kv_tier_bytes = 4096});
  EXPECT_THAT(harness.Refusal(Request(harness, 60)).message,
              ::testing::HasSubstr("--kv_tier_bytes"));
  const EngineHarness roomy(ModelPath("gqa"), {.kv_tier_bytes = kTierBytes});
  EXPECT_THAT(roomy.Refusal(Request(roomy, 60, 61)).message,
              ::testing::HasSubstr("a tier of 60 tokens has no 61 to attend to"));
  EXPECT_THAT(roomy.Refusal(Request(roomy, 60, 15)).message, ::testing::HasSubstr("pages of 16"));
  const EngineHarness none(ModelPath("gqa"), {});
  EXPECT_THAT(none.Refusal(Request(none, 60)).message,
              ::testing::HasSubstr("this server has no tier"));
}

TEST_F(Tier, GuardsAreRefusedWhereTheyCannotBe) {
  const EngineHarness harness(ModelPath("gqa"), {.kv_tier_bytes = kTierBytes});
  RequestOptions options = Request(harness, 0);
  options.kv.tier.guard = GuardRule();
  EXPECT_THAT(harness.Refusal(options).message, ::testing::HasSubstr("kv.tier.tokens is 0"));
  options.kv.tier.tokens = 60;
  options.kv.tier.guard = GuardRule{.asked = 0, .relax_prob = 2};
  const Rejection both = harness.Refusal(options);
  ASSERT_EQ(both.violations.size(), 2u);
  EXPECT_EQ(both.violations[0].description, "must be 1 to 1024, is 0");
  EXPECT_EQ(both.violations[1].description, "must be in [0, 1], is 2");
  options.kv.tier.guard = GuardRule();
  options.kv.policy = "snapkv";
  options.kv.params = {{"select", std::string("sample")}};
  EXPECT_THAT(harness.Refusal(options).message, ::testing::HasSubstr("choose select = top_k"));
  options.kv.params = {};
  options.kv.policy = "epikv_flat";
  EXPECT_THAT(harness.Refusal(options).message, ::testing::HasSubstr("gives tokens no scores"));
}

// Cancelled at any step, it gives everything back.
TEST_F(Tier, CancelledAtAnyStepLeavesNothing) {
  EngineHarness harness(ModelPath("gqa"),
                        {.kv_tier_bytes = kTierBytes, .prefill_chunk_tokens = 16});
  for (int step = 1; step < 60; ++step) {
    RequestOptions options = Request(harness, 60, 32);
    options.id = "it";
    options.completions = 1;
    const auto transcript = harness.Submit(options);
    for (int i = 0; i < step; ++i) harness.engine().Step();
    harness.engine().Cancel("it", absl::CancelledError("enough"));
    ASSERT_EQ(harness.engine().tier_ledger().reserved(), 0);
    ASSERT_EQ(harness.engine().ledger().reserved(), 0);
  }
}

}  // namespace tier_laws_test
}  // namespace epikv
