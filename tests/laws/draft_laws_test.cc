// A draft model guesses what its model would say, and changes nothing but when tokens come.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "runtime/executor/model_drafter.h"
#include "tests/fixtures/engine_harness.h"
#include "tests/fixtures/law_cases.h"

namespace epikv {
namespace draft_laws_test {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

RequestOptions Asking(const Manifest& manifest, float temperature, int64_t output = 60) {
  RequestOptions options;
  options.prompt = Text(manifest, 40, 23);
  options.stop.max_output_tokens = output;
  options.sampling = {.temperature = temperature, .top_k = 3, .seed = 5};
  options.output = {.logprobs = true, .kv_trace = true, .kept = true};
  return options;
}

ModelDrafter DrafterOf(const std::string& model, int64_t pool_rows = 1 << 16) {
  auto loaded = std::make_unique<LawModel>(LoadOnce(ModelPath(model)));
  const int64_t vocab_size = loaded->manifest().vocab_size;
  return {std::move(loaded), {.pool_rows = pool_rows, .vocab_size = vocab_size}};
}

std::vector<int32_t> GuessOf(ModelDrafter& drafter, SequenceId id,
                             const std::vector<int32_t>& tokens, int64_t most,
                             int64_t read_tokens = 256) {
  const DraftItem item{.id = id, .tokens = tokens, .most = most};
  return drafter.Guess({&item, 1}, read_tokens).front();
}

constexpr SequenceId kFirst{1}, kSecond{2};
constexpr int64_t kRead = 256;

TEST(ModelDrafter, GuessesWhatTheModelWouldSay) {
  for (const std::string model : {"mha", "gqa"}) {
    EngineHarness harness(ModelPath(model), {.end_tokens = false});
    const RequestOptions asked = Asking(harness.manifest(), 0, 20);
    const Transcript told = harness.Run(asked);
    ModelDrafter drafter = DrafterOf(model);
    ASSERT_TRUE(drafter.Open(kFirst, {}, 100));
    EXPECT_EQ(GuessOf(drafter, kFirst, asked.prompt, 20), told.tokens) << model;
    EXPECT_EQ(GuessOf(drafter, kFirst, asked.prompt, 5),
              std::vector(told.tokens.begin(), told.tokens.begin() + 5))
        << "asked again, it says the same";
  }
}

// Whatever has come of what it guessed before, it guesses what one guesses that knows nothing but
// the tokens.
TEST(ModelDrafter, FollowsWhateverComes) {
  std::mt19937 dice(3);
  ModelDrafter drafter = DrafterOf("gqa");
  std::vector<int32_t> tokens = Text(LoadOnce(ModelPath("gqa"))->manifest(), 30, 7);
  ASSERT_TRUE(drafter.Open(kFirst, {}, 400));
  int64_t came_true = 0;
  for (int round = 0; round < 40; ++round) {
    const std::vector<int32_t> guesses = GuessOf(drafter, kFirst, tokens, 1 + dice() % 6);
    ModelDrafter fresh = DrafterOf("gqa");
    ASSERT_TRUE(fresh.Open(kFirst, {}, 400));
    ASSERT_EQ(GuessOf(fresh, kFirst, tokens, std::ssize(guesses)), guesses) << round;
    const size_t kept = dice() % (guesses.size() + 1);
    tokens.insert(tokens.end(), guesses.begin(), guesses.begin() + kept);
    came_true += kept;
    // What comes then, which may be what was guessed; or nothing has come at all.
    if (kept > 0 || dice() % 4 > 0) tokens.push_back(dice() % 50);
  }
  EXPECT_GT(came_true, 20);
}

TEST(ModelDrafter, SequencesGuessTogetherWhatEachGuessesAlone) {
  ModelDrafter drafter = DrafterOf("gqa");
  const Manifest& manifest = LoadOnce(ModelPath("gqa"))->manifest();
  const std::vector<int32_t> one = Text(manifest, 30, 1), two = Text(manifest, 55, 2);
  ASSERT_TRUE(drafter.Open(kFirst, {}, 100));
  ASSERT_TRUE(drafter.Open(kSecond, {}, 100));
  const std::vector<DraftItem> both = {{.id = kFirst, .tokens = one, .most = 6},
                                       {.id = kSecond, .tokens = two, .most = 3}};
  const auto guesses = drafter.Guess(both, kRead);
  ModelDrafter alone = DrafterOf("gqa");
  ASSERT_TRUE(alone.Open(kFirst, {}, 100));
  ASSERT_TRUE(alone.Open(kSecond, {}, 100));
  EXPECT_EQ(guesses[0], GuessOf(alone, kFirst, one, 6));
  EXPECT_EQ(guesses[1], GuessOf(alone, kSecond, two, 3));
  EXPECT_GT(drafter.guess_time(), absl::ZeroDuration());
}

TEST(ModelDrafter, FollowsTheLogitBiasOfTheRequest) {
  ModelDrafter drafter = DrafterOf("gqa");
  const std::vector<int32_t> tokens = Text(LoadOnce(ModelPath("gqa"))->manifest(), 40, 1);
  ASSERT_TRUE(drafter.Open(kFirst, {}, 100));
  const std::map<int32_t, float> bias = {{11, 1000.0f}, {1 << 30, 2000.0f}};
  const DraftItem item{.id = kFirst, .tokens = tokens, .most = 3, .logit_bias = &bias};
  EXPECT_THAT(drafter.Guess({&item, 1}, kRead), ElementsAre(ElementsAre(11, 11, 11)));
}

TEST(ModelDrafter, GuessesNothingBehindTokensThatItDoesNotKnow) {
  ModelDrafter drafter = DrafterOf("gqa");
  const Manifest& manifest = LoadOnce(ModelPath("gqa"))->manifest();
  std::vector<int32_t> odd = Text(manifest, 40, 1), even = odd;
  odd.push_back(static_cast<int32_t>(manifest.vocab_size));
  ASSERT_TRUE(drafter.Open(kFirst, {}, 100));
  ASSERT_TRUE(drafter.Open(kSecond, {}, 100));
  const std::vector<DraftItem> both = {{.id = kFirst, .tokens = odd, .most = 3},
                                       {.id = kSecond, .tokens = even, .most = 3}};
  EXPECT_THAT(drafter.Guess(both, kRead), ElementsAre(SizeIs(0), SizeIs(3)));
  drafter.Close(kFirst);
  EXPECT_FALSE(drafter.Open(kFirst, odd, 100)) << "where the prompt has one";
}

TEST(ModelDrafter, WhoHasLittleToReadDoesNotWaitForALongPrompt) {
  ModelDrafter drafter = DrafterOf("gqa");
  const Manifest& manifest = LoadOnce(ModelPath("gqa"))->manifest();
  const std::vector<int32_t> much = Text(manifest, 40, 1), little = Text(manifest, 3, 2);
  ASSERT_TRUE(drafter.Open(kFirst, {}, 100));
  ASSERT_TRUE(drafter.Open(kSecond, {}, 100));
  const std::vector<DraftItem> both = {{.id = kFirst, .tokens = much, .most = 2},
                                       {.id = kSecond, .tokens = little, .most = 2}};
  EXPECT_THAT(drafter.Guess(both, 16), ElementsAre(SizeIs(0), SizeIs(2)));
}

TEST(ModelDrafter, ReadsALongPromptInSeveralCalls) {
  ModelDrafter drafter = DrafterOf("gqa"), whole = DrafterOf("gqa");
  const std::vector<int32_t> tokens = Text(LoadOnce(ModelPath("gqa"))->manifest(), 40, 1);
  ASSERT_TRUE(drafter.Open(kFirst, {}, 100));
  ASSERT_TRUE(whole.Open(kFirst, {}, 100));
  EXPECT_THAT(GuessOf(drafter, kFirst, tokens, 4, 16), IsEmpty());
  EXPECT_THAT(GuessOf(drafter, kFirst, tokens, 4, 0), IsEmpty());
  EXPECT_THAT(GuessOf(drafter, kFirst, tokens, 4, 16), IsEmpty());
  EXPECT_EQ(GuessOf(drafter, kFirst, tokens, 4, 16), GuessOf(whole, kFirst, tokens, 4));
}

TEST(ModelDrafter, TakesWhatItHasRoomFor) {
  const Manifest& manifest = LoadOnce(ModelPath("gqa"))->manifest();
  const int64_t lanes = std::ssize(manifest.layers) * manifest.num_kv_heads;
  ModelDrafter drafter = DrafterOf("gqa", 100 * lanes);
  EXPECT_FALSE(drafter.Open(kFirst, {}, manifest.context_length + 1));
  EXPECT_FALSE(drafter.Open(kFirst, {}, 101));
  ASSERT_TRUE(drafter.Open(kFirst, {}, 60));
  EXPECT_FALSE(drafter.Open(kSecond, {}, 41));
  ASSERT_TRUE(drafter.Open(kSecond, {}, 40));
  const std::vector<int32_t> full = Text(manifest, 40, 1), almost = Text(manifest, 58, 2);
  EXPECT_THAT(GuessOf(drafter, kSecond, full, 8), SizeIs(1)) << "it takes no room";
  EXPECT_THAT(GuessOf(drafter, kFirst, almost, 8), SizeIs(3));
  drafter.Close(kFirst);
  drafter.Close(kSecond);
  EXPECT_EQ(drafter.pool().free_rows(), 100 * lanes);
}

int64_t ExpectSameWithDraft(EngineHarness& harness, RequestOptions asked) {
  const Transcript plain = harness.Run(asked);
  asked.guess_tokens = 8;
  asked.guess_source = GuessSource::kDraft;
  const Transcript drafted = harness.Run(asked);
  EXPECT_TRUE(plain.ok() && drafted.ok());
  EXPECT_EQ(drafted.tokens, plain.tokens);
  EXPECT_EQ(drafted.logprobs, plain.logprobs);
  EXPECT_EQ(drafted.finished->kv.kept, plain.finished->kv.kept);
  EXPECT_EQ(drafted.finished->kv.rounds, plain.finished->kv.rounds);
  EXPECT_EQ(drafted.evictions.size(), plain.evictions.size());
  EXPECT_EQ(harness.engine().ledger().reserved(), 0);
  EXPECT_EQ(harness.drafter().pool().free_rows(), harness.drafter().pool().num_rows());
  return drafted.finished->guessed_tokens;
}

class EveryPolicyDrafts : public EveryPolicy {};

// Its own model guesses all that is greedy, and some of what is sampled.
TEST_P(EveryPolicyDrafts, SameOutputsAndSameKeptSets) {
  HarnessOptions options{.deterministic = true, .end_tokens = false};
  options.draft = ModelPath(model());
  EngineHarness harness = Harness(std::move(options));
  int64_t guessed = 0;
  for (const auto& [temperature, budget] : {std::pair(0.0f, 80), std::pair(0.7f, 400)}) {
    guessed += ExpectSameWithDraft(
        harness, WithPolicy(Asking(harness.manifest(), temperature, 100), policy(), budget));
  }
  if (!RoundsRows(policy())) {
    EXPECT_GT(guessed, 20);
  }
}

INSTANTIATE_TEST_SUITE_P(Laws, EveryPolicyDrafts,
                         testing::Combine(testing::Values("gqa"),
                                          testing::ValuesIn(EvictingPolicies())),
                         CaseName);

TEST(Drafts, ADraftThatIsTheModelIsRight) {
  HarnessOptions options{.end_tokens = false};
  options.draft = ModelPath("gqa");
  EngineHarness harness(ModelPath("gqa"), std::move(options));
  RequestOptions asked = Asking(harness.manifest(), 0);
  asked.guess_tokens = 8;
  asked.guess_source = GuessSource::kDraft;
  const Transcript told = harness.Run(asked);
  ASSERT_TRUE(told.ok());
  EXPECT_GT(told.finished->guessed_tokens, 20);
  EXPECT_GE(static_cast<double>(told.finished->accepted_tokens),
            .9 * static_cast<double>(told.finished->guessed_tokens));
}

TEST(Drafts, ADraftThatIsMostlyWrongChangesNothingEither) {
  HarnessOptions options{.deterministic = true, .end_tokens = false};
  options.draft = ModelPath("mha");
  EngineHarness harness(ModelPath("gqa"), std::move(options));
  RequestOptions asked = Asking(harness.manifest(), 0, 100);
  asked.kv = {.policy = "h2o", .budget = int64_t{80}, .params = {{"slack", int64_t{8}}}};
  EXPECT_GT(ExpectSameWithDraft(harness, asked), 3);
}

TEST(Drafts, WhereThereIsNoRoomGuessesAreLookedUp) {
  HarnessOptions options{.end_tokens = false};
  options.draft = ModelPath("gqa");
  options.draft_rows = 8;
  EngineHarness harness(ModelPath("gqa"), std::move(options));
  RequestOptions asked = Asking(harness.manifest(), 0);
  asked.prompt.insert(asked.prompt.end(), asked.prompt.begin(), asked.prompt.end());
  asked.guess_tokens = 8;
  asked.guess_source = GuessSource::kDraft;
  const Transcript told = harness.Run(asked);
  ASSERT_TRUE(told.ok());
  EXPECT_GT(told.finished->guessed_tokens, 0);
}

}  // namespace draft_laws_test
}  // namespace epikv
