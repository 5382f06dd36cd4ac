#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "policies/registry.h"
#include "policies/scored_policy.h"
#include "tests/fixtures/fake_sequence.h"
#include "tests/fixtures/golden_world.h"

// LAQ and LAQ++ against what the authors' code keeps of a prompt (golden/make_laq.py), and what is
// ours beside it: whom drafts leave out, and who sees what.

namespace epikv {
namespace laq_test {

using nlohmann::json;

FakeSequence::Options Options(const std::string& policy, int64_t prompt, int64_t budget) {
  FakeSequence::Options options;
  options.spec = FindPolicy(AllPolicies(), policy);
  options.shape = {
      .num_layers = 2, .num_heads = 2, .num_kv_heads = 2, .key_width = 8, .value_width = 8};
  options.prompt_tokens = prompt;
  options.budget = budget;
  return options;
}

TEST(Laq, KeepsOfAPromptWhatTheAuthorsCodeKeeps) {
  std::ifstream file(EPIKV_SOURCE_DIR "/tests/golden/laq.json");
  const json golden = json::parse(file);
  ASSERT_EQ(golden["runs"].size(), 6u);
  for (const json& run : golden["runs"]) {
    const int64_t prompt = run["prompt_tokens"], prompt_queries = run["prompt_queries"];
    SCOPED_TRACE(testing::Message() << "prompt " << prompt << ", queries " << prompt_queries);
    FakeSequence::Options options =
        Options(prompt_queries == 0 ? "laq" : "laq_plus", prompt, run["budget"]);
    options.params = {{"compat", true}};
    options.protection = {.recent = prompt_queries};
    FakeSequence sequence(options, GoldenWorld(run["seed"], 2, 2, 8));
    sequence.Prefill(prompt);
    const Eviction answer = sequence.Ask();  // with the lookahead
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    const auto& policy = dynamic_cast<const ScoredPolicy&>(sequence.policy());
    const std::vector<at::Tensor> scores = policy.ScoreAll(sequence.task());
    ASSERT_EQ(scores.size(), 4u);
    for (size_t lane = 0; lane < scores.size(); ++lane) {
      const json& theirs = run["lanes"][lane];
      const std::vector<float> expected = theirs["scores"];
      ASSERT_EQ(std::ssize(expected), prompt - prompt_queries);
      for (size_t i = 0; i < expected.size(); ++i) {  // slots are in birth order
        EXPECT_NEAR(scores[lane][static_cast<int64_t>(i)].item<float>(), expected[i], 1e-6)
            << "lane " << lane << ", token " << i;
      }
    }
    sequence.Drop(answer);
    for (int64_t lane = 0; lane < 4; ++lane) {
      std::vector<int32_t> kept = sequence.Kept(lane / 2, lane % 2);
      kept.resize(kept.size() - prompt_queries);  // the newest stay
      EXPECT_EQ(kept, run["lanes"][lane]["kept"].get<std::vector<int32_t>>()) << "lane " << lane;
    }
  }
}

// A draft is another policy's choice: of snapkv, or of streaming_llm.
TEST(Laq, DraftsAreTheOthersChoice) {
  for (const auto& [draft, other] :
       std::map<std::string, std::string>{{"snapkv", "snapkv"}, {"streaming_llm", ""}}) {
    FakeSequence::Options options = Options("laq", 90, 40);
    options.params = {{"draft", draft}};
    FakeSequence sequence(options, GoldenWorld(6, 2, 2, 8));
    sequence.Prefill(90);
    const Eviction drafted = sequence.policy().Draft(sequence.task());
    ASSERT_TRUE(drafted.status.ok()) << drafted.status;
    std::vector<std::vector<int32_t>> expected;
    if (other.empty()) {  // four sinks and the newest 36
      std::vector<int32_t> middle;
      for (int32_t token = 4; token < 54; ++token) middle.push_back(token);
      expected.assign(4, middle);
    } else {
      options.spec = FindPolicy(AllPolicies(), other);
      options.params = {
          {"window", int64_t{32}}, {"kernel", int64_t{7}}, {"pooling", std::string("max")}};
      FakeSequence alone(options, GoldenWorld(6, 2, 2, 8));
      alone.Prefill(90);
      expected = alone.Ask().victims;
    }
    ASSERT_EQ(drafted.victims.size(), expected.size());
    for (size_t lane = 0; lane < expected.size(); ++lane) {
      EXPECT_THAT(drafted.victims[lane], testing::UnorderedElementsAreArray(expected[lane]))
          << draft << ", lane " << lane;
    }
  }
}

// Without `compat` queries told ahead see all of the prompt: its newest tokens, too.
TEST(Laq, QueriesToldAheadSeeTheWholePrompt) {
  std::map<bool, std::vector<float>> newest;
  for (const bool compat : {false, true}) {
    FakeSequence::Options options = Options("laq", 90, 40);
    options.params = {{"compat", compat}, {"kernel", int64_t{1}}};
    FakeSequence sequence(options, GoldenWorld(5, 2, 2, 8));
    sequence.Prefill(90);
    ASSERT_TRUE(sequence.Ask().status.ok());
    const auto& policy = dynamic_cast<const ScoredPolicy&>(sequence.policy());
    const at::Tensor score = policy.ScoreAll(sequence.task())[0];
    double sum = 0;
    for (int64_t slot = 0; slot < 90; ++slot) sum += score[slot].item<double>();
    EXPECT_NEAR(sum, 1, 1e-5);
    newest[compat] = {score[88].item<float>(), score[89].item<float>()};
  }
  EXPECT_GT(newest[false][1], newest[true][1]);  // seen by all eight, not by one
  EXPECT_GT(newest[false][0], newest[true][0]);
}

// Where the prompt is within the budget nobody looks ahead, and decoded tokens are ranked as snapkv
// ranks them.
TEST(Laq, DecodedTokensAreRankedAsBySnapkv) {
  for (const char* const name : {"laq", "laq_plus"}) {
    std::vector<std::vector<std::vector<int32_t>>> rounds[2];
    for (int i = 0; i < 2; ++i) {
      FakeSequence::Options options = Options(i == 0 ? name : "snapkv", 20, 48);
      options.params = {{"window", int64_t{16}},
                        {"kernel", int64_t{7}},
                        {"pooling", std::string("max")},
                        {"slack", int64_t{7}}};
      FakeSequence sequence(options, GoldenWorld(6, 2, 2, 8));
      sequence.Prefill(20);
      for (int64_t token = 0; token < 100; ++token) {
        sequence.Decode();
        if (auto round = sequence.Round(); !round.empty()) rounds[i].push_back(std::move(round));
      }
    }
    EXPECT_EQ(rounds[0], rounds[1]) << name;
    EXPECT_GT(rounds[0].size(), 5u);
  }
}

// Who may look ahead scores a prompt by more queries than who does not, and decoded tokens alike.
TEST(Lookahead, IsAnOptionOfPoliciesThatAskAWindow) {
  for (const char* const name : {"snapkv", "rkv", "laprox"}) {
    std::vector<std::vector<int32_t>> prompt[2];
    for (int i = 0; i < 2; ++i) {
      FakeSequence::Options options = Options(name, 90, 40);
      options.shape.hidden_size = 16;
      options.params = {{"window", int64_t{4}},
                        {"queries", std::string(i == 0 ? "recent" : "lookahead")}};
      FakeSequence sequence(options, GoldenWorld(7, 2, 2, 8));
      EXPECT_EQ(sequence.traits().pass.lookahead, i == 0 ? 0 : 8);
      sequence.Prefill(90);
      prompt[i] = sequence.Round();
    }
    EXPECT_NE(prompt[0], prompt[1]) << name;
  }
}

// Lanes that share a budget draft as if they did not; or nothing is drafted.
TEST(Lookahead, DraftsOfPoolsAndNone) {
  for (const char* const allocator : {"uniform", "head_pool", "model_pool", "pyramid"}) {
    for (const char* const draft : {"snapkv", "streaming_llm", "whole"}) {
      SCOPED_TRACE(testing::Message() << allocator << ", " << draft);
      FakeSequence::Options options = Options("snapkv", 90, 40);
      options.params = {{"window", int64_t{4}},
                        {"queries", std::string("lookahead")},
                        {"draft", std::string(draft)},
                        {"allocator", std::string(allocator)}};
      FakeSequence sequence(options, GoldenWorld(8, 2, 2, 8));
      EXPECT_EQ(sequence.traits().pass.drafts, std::string(draft) != "whole");
      sequence.Prefill(90);
      EXPECT_FALSE(sequence.Round().empty());  // which checks the draft
    }
  }
}

}  // namespace laq_test
}  // namespace epikv
