#include "runtime/engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "tests/fixtures/engine_fixture.h"

namespace epikv {
namespace engine_outputs_test {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

// Ends.

TEST_F(EngineTest, EndsAtTheModelsEnd) {
  auto output = Submit(Ask("a", 61, 10));
  RunAll();
  EXPECT_THAT(output->tokens, ElementsAre(61, 62, 63));
  EXPECT_EQ(output->text, "w61 w62");
  EXPECT_EQ(output->reason(), "end");
  EXPECT_FALSE(output->finished.at(0).stop_token.has_value());
}

TEST_F(EngineTest, EndsAtAStopToken) {
  RequestOptions options = Ask("a", 5, 10);
  options.stop.tokens = {30, 7};
  auto output = Submit(options);
  RunAll();
  EXPECT_THAT(output->tokens, ElementsAre(5, 6, 7));
  EXPECT_EQ(output->text, "w5 w6");
  EXPECT_EQ(output->reason(), "stop token");
  EXPECT_EQ(output->finished.at(0).stop_token, 7);
}

TEST_F(EngineTest, StopTokenThatIsTheModelsEndWasAskedFor) {
  RequestOptions options = Ask("a", 61, 10);
  options.stop.tokens = {kEnd};
  auto output = Submit(options);
  RunAll();
  EXPECT_EQ(output->reason(), "stop token");
}

TEST_F(EngineTest, NothingEndsARequestBeforeItsLeastOutput) {
  RequestOptions options = Ask("a", 60, 20);
  options.stop = {
      .max_output_tokens = 20, .strings = {"w61 w62"}, .tokens = {1, 4}, .min_output_tokens = 5};
  auto output = Submit(options);
  RunAll();
  // 63 ends the model's text and 1 was asked for: both are passed over while they may not come.
  EXPECT_THAT(output->tokens, ElementsAre(60, 61, 62, 0, 2, 3, 4));
  EXPECT_EQ(output->text, "w60 w61 w62 w0 w2 w3");
  EXPECT_EQ(output->reason(), "stop token");

  options = Ask("b", 61, 20);
  options.stop.min_output_tokens = 2;
  output = Submit(options);
  RunAll();
  EXPECT_THAT(output->tokens, ElementsAre(61, 62, 63));
  EXPECT_EQ(output->reason(), "end");
}

TEST_F(EngineTest, TheModelsEndMayBeIgnored) {
  RequestOptions options = Ask("a", 62, 4);
  options.stop.ignore_end = true;
  auto output = Submit(options);
  RunAll();
  EXPECT_THAT(output->tokens, ElementsAre(62, kEnd, 0, 1));
  EXPECT_EQ(output->reason(), "length");

  options = Ask("b", 62, 4);
  options.stop = {.max_output_tokens = 4, .tokens = {kEnd}, .ignore_end = true};
  output = Submit(options);
  RunAll();
  EXPECT_EQ(output->reason(), "stop token") << "the request's own still ends it";
}

TEST_F(EngineTest, EndsAtAStopStringAcrossTokens) {
  RequestOptions options = Ask("a", 5, 10);
  options.stop.strings = {"w99", "w7 w8"};
  auto output = Submit(options);
  RunAll();
  EXPECT_THAT(output->tokens, ElementsAre(5, 6, 7, 8));
  EXPECT_EQ(output->text, "w5 w6 ");
  EXPECT_EQ(output->reason(), "stop string");
  EXPECT_EQ(output->finished.at(0).stop_string, "w7 w8");
}

TEST_F(EngineTest, StopMayStayInTheText) {
  RequestOptions options = Ask("a", 5, 10);
  options.stop.strings = {"w7 w8"};
  options.stop.include = true;
  auto output = Submit(options);
  RunAll();
  EXPECT_EQ(output->text, "w5 w6 w7 w8");
}

TEST_F(EngineTest, TextThatMayBeginAStopIsHeldBackAndFlushedAtTheEnd) {
  RequestOptions options = Ask("a", 5, 3);
  options.stop.strings = {"w6 w7 w8"};
  Submit(options);
  EXPECT_THAT(Step(), HasSubstr("a> tokens 5 'w5'\n"));
  EXPECT_THAT(Step(), HasSubstr("a> tokens 6 ' '\n"));
  EXPECT_THAT(Step(), HasSubstr("a> tokens 7 'w6 w7'\na> length\n"));
}

TEST_F(EngineTest, StopAtTheLastTokenIsAStop) {
  RequestOptions options = Ask("a", 5, 3);
  options.stop.tokens = {7};
  auto output = Submit(options);
  RunAll();
  EXPECT_EQ(output->reason(), "stop token");
}

TEST_F(EngineTest, StopStringEndsARequestThatWantsNoText) {
  RequestOptions options = Ask("a", 5, 10);
  options.stop.strings = {"w7"};
  options.output.text = false;
  auto output = Submit(options);
  RunAll();
  EXPECT_EQ(output->text, "");
  EXPECT_THAT(output->tokens, ElementsAre(5, 6, 7));
  EXPECT_EQ(output->reason(), "stop string");
}

TEST_F(EngineTest, LogprobsComeOnlyWhereAskedFor) {
  auto silent = Submit(Ask("a", 5, 3));
  RequestOptions options = Ask("b", 5, 3);
  options.output.logprobs = true;
  auto telling = Submit(options);
  RunAll();
  EXPECT_THAT(silent->logprobs, IsEmpty());
  EXPECT_THAT(telling->logprobs, ElementsAre(-0.125f, -0.125f, -0.125f));
  EXPECT_THAT(telling->greedy, IsEmpty());
}

TEST_F(EngineTest, TheLikeliestTokensComeWithEachToken) {
  RequestOptions options = Ask("a", 5, 2);
  options.output.top_logprobs = 2;
  auto generated = Submit(options);
  options = Ask("b", 5, 1);
  options.forced = {5, 9};
  options.output.top_logprobs = 2;
  auto scored = Submit(options);
  auto silent = Submit(Ask("c", 5, 2));
  RunAll();
  using Top = std::vector<TokenLogprob>;
  const Top first = {{5, -0.125f}, {6, -1.125f}}, second = {{6, -0.125f}, {7, -1.125f}};
  EXPECT_THAT(generated->top_logprobs, ElementsAre(first, second));
  EXPECT_THAT(scored->top_logprobs, ElementsAre(first, second));
  EXPECT_THAT(silent->top_logprobs, IsEmpty());
  EXPECT_THAT(generated->logprobs, IsEmpty()) << "they were not asked for";
}

TEST_F(EngineTest, PromptLogprobsComeByChunkBeforeTheFirstToken) {
  Build({.engine = {.scheduler = {.prefill_chunk_tokens = 4}}});
  RequestOptions options = Ask("a", 10, 2);
  options.prompt[3] = 40;  // unlikely, and so is what follows it
  options.output.prompt_logprobs = true;
  options.output.top_logprobs = 1;
  auto output = Submit(options);
  EXPECT_THAT(Step(), HasSubstr("a> prompt 1+4\n"));
  EXPECT_THAT(Step(), HasSubstr("a> prompt 5+4\n"));
  EXPECT_THAT(Step(), HasSubstr("a> tokens 10 'w10' prompt 9+1\n"));
  RunAll();
  std::vector<int32_t> tokens = {options.prompt[0]};  // it has no log-probability
  std::vector<float> logprobs;
  for (const PromptLogprobs& part : output->prompt) {
    EXPECT_EQ(part.first, static_cast<int64_t>(tokens.size()));
    EXPECT_THAT(part.top, SizeIs(part.tokens.size()));
    tokens.insert(tokens.end(), part.tokens.begin(), part.tokens.end());
    logprobs.insert(logprobs.end(), part.logprobs.begin(), part.logprobs.end());
  }
  EXPECT_EQ(tokens, options.prompt);
  EXPECT_THAT(logprobs,
              ElementsAre(-.125f, -.125f, -4, -4, -.125f, -.125f, -.125f, -.125f, -.125f));
  EXPECT_THAT(output->prompt[0].top[2], ElementsAre(TokenLogprob{3, -0.125f}));
}

TEST_F(EngineTest, PromptOfOneTokenHasNoLogprobs) {
  RequestOptions options = Ask("a", 1, 2);
  options.output.prompt_logprobs = true;
  auto output = Submit(options);
  RunAll();
  EXPECT_THAT(output->prompt, IsEmpty());
  EXPECT_THAT(output->tokens, SizeIs(2));
}

TEST_F(EngineTest, ProgressIsToldAfterEachChunkWhereThereAreSeveral) {
  Build({.engine = {.scheduler = {.prefill_chunk_tokens = 16}}});
  RequestOptions options = Ask("a", 37, 2);
  options.output.progress = true;
  Submit(options);
  EXPECT_THAT(Step(), HasSubstr("a> 16 of 37\n"));
  EXPECT_THAT(Step(), HasSubstr("a> 32 of 37\n"));
  EXPECT_THAT(Step(), HasSubstr("a> tokens 37 'w37' 37 of 37\n"));
  EXPECT_THAT(Step(), Not(HasSubstr("of 37")));
  options = Ask("b", 16, 2);
  options.output.progress = true;
  Submit(options);
  EXPECT_THAT(Step(), HasSubstr("b> tokens 16 'w16'\n"));
  RunAll();
}

TEST_F(EngineTest, SummaryCountsAndTimes) {
  script_->on_forward = [this](absl::Span<const WorkItem>) {
    now_ += absl::Seconds(1);
    return absl::OkStatus();
  };
  RequestOptions options = Ask("a", 20, 15, "by_chunk", 10);
  options.output.kept = true;
  auto output = Submit(options);
  now_ += absl::Seconds(5);  // in the queue
  RunAll();
  const Finished& finished = output->finished.at(0);
  EXPECT_EQ(finished.prompt_tokens, 20);
  EXPECT_EQ(finished.output_tokens, 15);
  // 20 down to 10, then 11 down to 10 at each decode step but the last, whose token goes with it.
  EXPECT_EQ(finished.kv.peak_entries, 20 * kFakeLanes);
  EXPECT_EQ(finished.kv.rounds, 14);
  EXPECT_EQ(finished.kv.evicted_entries, (10 + 13) * kFakeLanes);
  EXPECT_EQ(finished.kv.final_entries, 11 * kFakeLanes);
  EXPECT_EQ(finished.kv.peak_bytes, 20 * kTokenBytes);
  EXPECT_THAT(finished.kv.kept, SizeIs(11));
  EXPECT_EQ(finished.timings.queue, absl::Seconds(5));
  EXPECT_EQ(finished.timings.prefill, absl::Seconds(1));
  EXPECT_EQ(finished.timings.time_to_first_token, absl::Seconds(6));
  EXPECT_EQ(finished.timings.decode, absl::Seconds(14));
}

// Scoring.

TEST_F(EngineTest, ScoringForcesOneTokenAStep) {
  RecordItems();
  RequestOptions options = Ask("a", 5, 1);
  options.forced = {5, 9, 10, kEnd, 0};  // the model's end ends nothing here
  auto output = Submit(options);
  RunAll();
  EXPECT_EQ(output->tokens, options.forced);
  // 9 comes after 5 only unlikely, 0 is what follows 63.
  EXPECT_THAT(output->greedy, ElementsAre(true, false, true, false, true));
  EXPECT_THAT(output->logprobs, ElementsAre(-0.125f, -4, -0.125f, -4, -0.125f));
  EXPECT_EQ(output->text, "");
  EXPECT_EQ(output->reason(), "length");
  EXPECT_EQ(output->finished.at(0).output_tokens, 5);

  ASSERT_THAT(seen_, SizeIs(5));
  for (size_t i = 0; i < seen_.size(); ++i) {
    EXPECT_EQ(seen_[i].num_outputs, 1);
    EXPECT_THAT(seen_[i].forced, ElementsAre(options.forced[i]));
    EXPECT_EQ(seen_[i].decode, i > 0);
    if (i > 0) {
      EXPECT_THAT(seen_[i].tokens, ElementsAre(options.forced[i - 1]));
    }
  }
}

TEST_F(EngineTest, ScoringInChunksForcesWithThePrompt) {
  Build({.engine = {.scheduler = {.prefill_chunk_tokens = 4}}});
  RecordItems();
  RequestOptions options = Ask("a", 6, 1);
  options.forced = {6, 7, 9, 10, 11};
  options.force_in_chunks = true;
  auto output = Submit(options);
  RunAll();
  EXPECT_EQ(output->tokens, options.forced);
  EXPECT_THAT(output->greedy, ElementsAre(true, true, false, true, true));

  ASSERT_THAT(seen_, SizeIs(3));
  EXPECT_THAT(seen_[0].tokens, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(seen_[0].forced, IsEmpty());
  EXPECT_THAT(seen_[1].tokens, ElementsAre(4, 5, 6, 7));  // rows of 5, 6, 7 give a token each
  EXPECT_THAT(seen_[1].forced, ElementsAre(6, 7, 9));
  EXPECT_THAT(seen_[2].tokens, ElementsAre(9, 10));  // 11 is never cached
  EXPECT_THAT(seen_[2].forced, ElementsAre(10, 11));
  for (const SeenItem& item : seen_) {
    EXPECT_EQ(item.num_outputs, static_cast<int64_t>(item.forced.size()));
    EXPECT_FALSE(item.decode);
  }
}

// Both cadences force every token once, on the row of the token before it.
TEST_F(EngineTest, ScoringGivesTheSameInBothCadencesForAllSizes) {
  std::mt19937 random(5);
  auto draw = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  for (int round = 0; round < 200; ++round) {
    Build({.engine = {.scheduler = {.max_step_tokens = draw(1, 40),
                                    .prefill_chunk_tokens = draw(1, 20)}}});
    outputs_.clear();
    observer_.finished_count.clear();
    RecordItems();
    RequestOptions options = Ask("decode", draw(1, 50), 1);
    int32_t token = options.prompt.back();
    for (int64_t left = draw(1, 50); left > 0; --left) {
      token = draw(0, 3) == 0 ? draw(0, 63) : (token + 1) % 64;  // mostly the likeliest
      options.forced.push_back(token);
    }
    const auto one_by_one = Submit(options);
    options.id = "chunks";
    options.force_in_chunks = true;
    const auto in_chunks = Submit(options);
    RunAll();
    EXPECT_EQ(one_by_one->tokens, options.forced);
    EXPECT_EQ(in_chunks->tokens, options.forced);
    EXPECT_EQ(in_chunks->logprobs, one_by_one->logprobs);
    EXPECT_EQ(in_chunks->greedy, one_by_one->greedy);
    for (const SeenItem& item : seen_) ASSERT_EQ(item.num_outputs, item.forced.size());
    seen_.clear();
  }
}

}  // namespace engine_outputs_test
}  // namespace epikv
