// Several ranks that serve one model together say what one that has all of it says: the same
// tokens, and what policies keep, head by head. Ranks are threads here; ranks_test and
// tensor_parallel_test have processes.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <variant>
#include <vector>

#include "policies/registry.h"
#include "policies/scored_policy.h"
#include "runtime/executor/ranked_executor.h"
#include "runtime/ranks/ranks.h"
#include "tests/fixtures/engine_harness.h"
#include "tests/fixtures/law_cases.h"

namespace epikv {
namespace rank_laws_test {

using testing::HasSubstr;
using testing::IsEmpty;

// Small, so that what a step exchanges goes in several pieces.
constexpr int64_t kSlotBytes = 4096;

class Team {
 public:
  Team(const std::string& model, int size, HarnessOptions options = {})
      : memory_(Ranks::Share(size, kSlotBytes)), statuses_(size, absl::OkStatus()) {
    std::vector<absl::StatusOr<std::unique_ptr<Model>>> shards(size);
    std::vector<std::thread> loading;
    for (int r = 0; r < size; ++r) ranks_.push_back(std::make_shared<Ranks>(memory_, r));
    for (int r = 0; r < size; ++r) {
      loading.emplace_back([&, r] {
        at::set_num_threads(1);
        shards[r] = LoadModelFile(ModelPath(model), {.ranks = ranks_[r]});
      });
    }
    for (std::thread& thread : loading) thread.join();
    load_ = shards[0].status();
    if (!load_.ok()) return;
    for (int r = 1; r < size; ++r) {
      HarnessOptions own = options;
      own.ranks = ranks_[r];
      others_.emplace_back(
          [this, r, own, shard = std::shared_ptr<const Model>(*std::move(shards[r]))]() mutable {
            statuses_[r] = ServeRank(std::move(shard), own);
          });
    }
    options.ranks = ranks_[0];
    harness_.emplace(std::shared_ptr<const Model>(*std::move(shards[0])), std::move(options));
  }
  ~Team() { End(); }

  const absl::Status& load() const { return load_; }
  EngineHarness& harness() { return *harness_; }
  Ranks& rank(int r) { return *ranks_[r]; }
  // How the others ended.
  const std::vector<absl::Status>& End() {
    harness_.reset();
    for (std::thread& thread : others_) thread.join();
    others_.clear();
    return statuses_;
  }

 private:
  const std::shared_ptr<RankMemory> memory_;
  std::vector<std::shared_ptr<Ranks>> ranks_;
  absl::Status load_;
  std::vector<std::thread> others_;
  std::vector<absl::Status> statuses_;
  std::optional<EngineHarness> harness_;
};

void ExpectNear(const std::vector<float>& values, const std::vector<float>& expected,
                float tolerance) {
  ASSERT_EQ(values.size(), expected.size());
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_NEAR(values[i], expected[i], tolerance) << "token " << i;
  }
}

// What the first heads of each layer have dropped: by round, lane by lane, ascending.
using Victims = std::map<int64_t, std::vector<std::vector<int32_t>>>;

Victims VictimsOf(const Transcript& transcript, int64_t heads) {
  Victims all;
  for (const EvictionTrace& round : transcript.evictions) {
    std::vector<std::vector<int32_t>> of_round;
    bool any = false;
    for (const auto& victims : round.victims) {
      if (victims.head.value_or(0) >= heads) continue;
      of_round.push_back(victims.index);
      std::sort(of_round.back().begin(), of_round.back().end());
      any = any || !victims.index.empty();
    }
    if (any) all[round.at_token] = of_round;
  }
  return all;
}

class EveryPolicyByRanks : public testing::TestWithParam<std::tuple<int, PolicyCase>> {
 protected:
  // One team of each size serves all policies, so that its shards are loaded once.
  static Team& TeamOf(int size) {
    std::unique_ptr<Team>& team = Teams()[size];
    if (team == nullptr) team = std::make_unique<Team>("mha", size, Options());
    return *team;
  }
  // Longer prompts are read in several steps, most of which have no logits.
  static HarnessOptions Options() {
    HarnessOptions options{.prefill_chunk_tokens = 48, .end_tokens = false};
    options.policies = LawPolicies();
    return options;
  }
  void TearDown() override {
    if (HasFailure()) Teams().clear();  // the others' are their own
  }
  static void TearDownTestSuite() {
    for (const auto& [size, team] : Teams()) {
      for (const absl::Status& status : team->End()) EXPECT_TRUE(status.ok()) << status;
    }
    Teams().clear();
  }

 private:
  static std::map<int, std::unique_ptr<Team>>& Teams() {
    static auto& teams = *new std::map<int, std::unique_ptr<Team>>;
    return teams;
  }
};

TEST_P(EveryPolicyByRanks, SaysAndKeepsWhatOneAloneDoes) {
  const auto& [size, policy] = GetParam();
  EngineHarness alone(ModelPath("mha"), Options());
  Team& team = TeamOf(size);
  ASSERT_TRUE(team.load().ok()) << team.load();
  const PolicySpec& spec = *FindPolicy(LawPolicies(), policy.policy);
  const int64_t heads = alone.manifest().num_kv_heads / size;
  for (const int64_t prompt : {30, 120}) {  // beside the budget, and over it
    RequestOptions asked;
    asked.prompt = Text(alone.manifest(), prompt, 3);
    asked.stop.max_output_tokens = 90;
    asked.sampling = {.temperature = 0.7f, .seed = 5};
    asked.output.logprobs = true;
    asked.guess_tokens = prompt < 80 ? 6 : 0;
    asked = WithPolicy(asked, policy, 80);
    auto resolved = alone.admission().Resolve(asked);
    if (std::holds_alternative<Rejection>(resolved)) continue;  // it takes no such prompt
    if (!DecidesByParts(spec, std::get<Request>(resolved).traits)) {
      EXPECT_THAT(team.harness().Refusal(asked).message, HasSubstr("compares KV heads"));
      continue;
    }
    const Transcript one = alone.Run(asked), many = team.harness().Run(asked);
    ASSERT_TRUE(one.ok()) << one.finished->status;
    ASSERT_TRUE(many.ok()) << many.finished->status;
    EXPECT_EQ(many.tokens, one.tokens);
    ExpectNear(many.logprobs, one.logprobs, 1e-3f);
    EXPECT_EQ(VictimsOf(many, heads), VictimsOf(one, heads));
    EXPECT_EQ(team.harness().engine().ledger().reserved(), 0);
    const std::optional<Thought> thought = ThoughtIn(alone.tokenizer(), one.tokens);
    if (!thought.has_value() || spec.name == "thinkv_tbe") continue;
    asked.thinking = thought->marks;
    asked.kv.evict_thinking = true;
    const Transcript thinks = alone.Run(asked), many_think = team.harness().Run(asked);
    ASSERT_TRUE(many_think.ok()) << many_think.finished->status;
    EXPECT_EQ(many_think.tokens, thinks.tokens);
    EXPECT_EQ(VictimsOf(many_think, heads), VictimsOf(thinks, heads));
  }
}

std::string NameOf(const testing::TestParamInfo<std::tuple<int, PolicyCase>>& info) {
  return std::get<1>(info.param).label + "_" + std::to_string(std::get<0>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Laws, EveryPolicyByRanks,
                         testing::Combine(testing::Values(2, 4),
                                          testing::ValuesIn(EvictingPolicies())),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(NightlyVariants, EveryPolicyByRanks,
                         testing::Combine(testing::Values(2), testing::ValuesIn(PolicyVariants())),
                         NameOf);

// Its scores are no numbers on the second rank's heads.
class HalfBroken final : public ScoredPolicy {
 public:
  HalfBroken() : ScoredPolicy(Granularity::kHead) {}

 private:
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    const double broken = task.cache.first_kv_head() > 0 ? std::nan("") : 0;
    return lane.index().to(at::kFloat) + broken;
  }
};

constexpr PolicySpec kHalfBroken{
    .name = "half_broken",
    .traits = [](const Params&,
                 const ModelShape&) { return PolicyTraits{.granularity = Granularity::kHead}; },
    .make = [](const Params&, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<HalfBroken>();
    }};

TEST(RankLaws, APolicyThatFailsOnOneRankFailsItsRequestAlone) {
  const PolicySpec* const catalog[] = {FindPolicy(AllPolicies(), "full"), &kHalfBroken};
  HarnessOptions options{.end_tokens = false};
  options.policies = catalog;
  Team team("mha", 2, options);
  ASSERT_TRUE(team.load().ok()) << team.load();
  RequestOptions asked;
  asked.prompt = Text(team.harness().manifest(), 30, 3);
  asked.stop.max_output_tokens = 90;
  const auto other = team.harness().Submit(asked);
  const Transcript failed = team.harness().Run(WithPolicy(asked, {.policy = "half_broken"}, 60));
  EXPECT_THAT(std::string(failed.finished->status.message()),
              HasSubstr("policy 'half_broken' failed: on the KV heads of rank 1"));
  EXPECT_TRUE(other->ok()) << other->finished->status;
  EXPECT_TRUE(team.harness().Run(asked).ok());
  for (const absl::Status& status : team.End()) EXPECT_TRUE(status.ok()) << status;
}

class EveryModelByRanks : public testing::TestWithParam<const char*> {};

TEST_P(EveryModelByRanks, SaysWhatOneAloneDoes) {
  const std::string model = GetParam();
  EngineHarness alone(ModelPath(model));
  Team team(model, 2);
  ASSERT_TRUE(team.load().ok()) << team.load();
  const RequestOptions asked = Scoring(alone.manifest(), 40, 60, 7);
  const Transcript one = alone.Run(asked), many = team.harness().Run(asked);
  ASSERT_TRUE(many.ok()) << many.finished->status;
  const bool narrow = alone.manifest().dtype != DType::kFloat32;
  const bool integers = !alone.manifest().quantization.empty();
  ExpectNear(many.logprobs, one.logprobs, narrow || integers ? 0.15f : 1e-3f);
}

INSTANTIATE_TEST_SUITE_P(Laws, EveryModelByRanks,
                         testing::Values("mha", "gqa", "tied", "bent", "gqa_bf16", "gqa_fp16",
                                         "wide", "wide_bf16", "wide_fp16", "wide_int8",
                                         "wide_int4"));

// Completions, cached prefixes, guesses, requests that come and go: all at once.
TEST(RankLaws, WhatIsServedTogetherIsWhatOneAloneServes) {
  HarnessOptions options{.prefill_chunk_tokens = 32,
                         .deterministic = true,
                         .max_prefix_bytes = 1 << 20,
                         .end_tokens = false};
  EngineHarness alone(ModelPath("mha"), options);
  Team team("mha", 2, options);
  ASSERT_TRUE(team.load().ok()) << team.load();
  std::vector<RequestOptions> all;
  for (int i = 0; i < 8; ++i) {
    RequestOptions asked;
    asked.prompt = Text(alone.manifest(), 70, i / 2);
    asked.stop.max_output_tokens = 40;
    asked.completions = i % 2 == 0 ? 1 : 1 + i % 3;
    asked.sampling = {.temperature = i % 2 == 0 ? 0.0f : 0.8f, .seed = 9};
    asked.guess_tokens = i % 2 == 0 ? 6 : 0;
    if (i % 4 == 3) asked = WithPolicy(asked, {.policy = "h2o"}, 48);
    if (i % 4 == 2) asked.output.prompt_logprobs = true;
    all.push_back(asked);
  }
  std::vector<std::shared_ptr<Transcript>> many;
  for (size_t i = 0; i < all.size(); ++i) {
    many.push_back(team.harness().Submit(all[i]));
    for (size_t step = 0; step < i; ++step) team.harness().engine().Step();
  }
  const auto cancelled = team.harness().Submit([&] {
    RequestOptions asked = all[0];
    asked.id = "gone";
    return asked;
  }());
  team.harness().engine().Step();
  team.harness().engine().Cancel("gone", absl::CancelledError("its client left"));
  team.harness().RunAll();
  team.harness().engine().DropPrefixes();
  for (size_t i = 0; i < all.size(); ++i) {
    const Transcript one = alone.Run(all[i]);
    ASSERT_TRUE(one.ok() && many[i]->ok()) << many[i]->finished->status;
    EXPECT_EQ(many[i]->tokens, one.tokens) << "request " << i;
    ExpectNear(many[i]->prompt.logprobs, one.prompt.logprobs, 1e-3f);
    ASSERT_EQ(many[i]->completions.size(), one.completions.size());
    for (size_t c = 0; c < one.completions.size(); ++c) {
      EXPECT_EQ(many[i]->completions[c].tokens, one.completions[c].tokens);
    }
  }
  EXPECT_EQ(team.harness().engine().ledger().reserved(), 0);
  for (const absl::Status& status : team.End()) EXPECT_TRUE(status.ok()) << status;
}

TEST(RankLaws, ARankThatFailsEndsWhatRunsAndSaysWhy) {
  Team team("mha", 2, {.end_tokens = false});
  ASSERT_TRUE(team.load().ok()) << team.load();
  RequestOptions asked;
  asked.prompt = {1, 2, 3};
  asked.stop.max_output_tokens = 40;
  const auto running = team.harness().Submit(asked);
  for (int i = 0; i < 5; ++i) team.harness().engine().Step();
  team.rank(1).Fail("rank 1 was killed");
  team.harness().RunAll();
  ASSERT_TRUE(running->finished.has_value());
  EXPECT_EQ(running->finished->status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(running->finished->status.message()), HasSubstr("rank 1 was killed"));
  const Transcript next = team.harness().Run(asked);
  EXPECT_FALSE(next.ok());
  EXPECT_EQ(team.harness().engine().ledger().reserved(), 0);
  EXPECT_THAT(std::string(team.End()[1].message()), HasSubstr("rank 1 was killed"));
}

TEST(RankLaws, WhatRanksCannotDoIsRefused) {
  Team team("mha", 2);
  ASSERT_TRUE(team.load().ok()) << team.load();
  RequestOptions asked;
  asked.prompt = {1, 2, 3};
  asked.stop.max_output_tokens = 4;
  const auto refused = [&](auto change) {
    RequestOptions changed = asked;
    change(changed);
    return team.harness().Refusal(changed).message;
  };
  EXPECT_THAT(refused([](RequestOptions& of) { of.output.packet = true; }),
              HasSubstr("packets do not work while several ranks serve the model"));
  EXPECT_THAT(refused([](RequestOptions& of) { of.kv.tier.tokens = 100; }), HasSubstr("no tier"));
  EXPECT_THAT(refused([](RequestOptions& of) {
                of.kv = {.policy = "snapkv",
                         .budget = int64_t{64},
                         .params = {{"allocator", std::string("head_pool")}}};
                of.stop.max_output_tokens = 100;
              }),
              HasSubstr("compares KV heads with one another"));
}

TEST(RankLaws, AModelThatCannotBeSplitSaysWhy) {
  EXPECT_THAT(std::string(Team("mqa", 2).load().message()),
              HasSubstr("cannot be split into 2 parts: its 1 KV heads"));
  EXPECT_THAT(std::string(Team("gqa", 4).load().message()),
              HasSubstr("cannot be split into 4 parts: its 2 KV heads"));
}

}  // namespace rank_laws_test
}  // namespace epikv
