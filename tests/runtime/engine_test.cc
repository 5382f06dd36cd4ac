#include "runtime/engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/admission/admission.h"
#include "runtime/base/reason.h"
#include "tests/fixtures/engine_fixture.h"

namespace epikv {
namespace engine_test {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

// Requests at idle.

TEST_F(EngineTest, ARequestAtIdleRunsAloneAndIsNoTraffic) {
  const auto idle = Idle(Ask("", 5, 3, "by_chunk", 4));
  EXPECT_TRUE(engine_->idles());
  EXPECT_EQ(engine_->running(), 0);
  EXPECT_EQ(engine_->waiting(), 0);
  EXPECT_THAT(engine_->Describe(), IsEmpty());
  EXPECT_EQ(Step(), "> tokens 5 'w5'\n");
  EXPECT_GT(observer_.steps.back().kv_used_bytes, 0) << "what it holds shows";
  EXPECT_EQ(engine_->outlook().room.free_bytes, engine_->ledger().capacity())
      << "whoever comes may have it";
  EXPECT_EQ(Step(), "> tokens 6 ' w6'\n");
  EXPECT_EQ(Step(), "> tokens 7 ' w7'\n> length\n");
  EXPECT_GT(idle->finished.front().kv.evicted_entries, 0);
  EXPECT_FALSE(engine_->idles());
  EXPECT_FALSE(engine_->Step());
  EXPECT_FALSE(engine_->outlook().measured) << "forecasts learn nothing from it";
  for (const StepStats& step : observer_.steps) {
    EXPECT_EQ(step.sequences + step.prefill_tokens + step.decode_tokens + step.running, 0);
  }
  EXPECT_EQ(observer_.steps.back().kv_used_bytes, 0);
  EXPECT_TRUE(observer_.admitted.empty() && observer_.finished_count.empty());
  ExpectNothingHeld();
}

TEST_F(EngineTest, ForecastsLearnNothingFromTheEndOfARequestAtIdle) {
  const double before = engine_->outlook().present.decode_share;
  Idle(Ask("", 5, 500));  // it ends by itself, long before
  RunAll();
  EXPECT_EQ(engine_->outlook().present.decode_share, before);
  Submit(Ask("a", 5, 500));
  RunAll();
  EXPECT_LT(engine_->outlook().present.decode_share, before);
}

// Whoever steps the engine has to wait until the reader is ready.
TEST_F(EngineTest, ARequestAtIdleWhoseReaderIsNotReadyRunsNoStep) {
  const auto idle = Idle(Ask("", 5, 3));
  EXPECT_TRUE(engine_->Step());
  idle->ready = false;
  EXPECT_FALSE(engine_->Step());
  EXPECT_TRUE(engine_->idles());
  EXPECT_EQ(idle->tokens.size(), 1u);
  idle->ready = true;
  RunAll();
  EXPECT_EQ(idle->tokens.size(), 3u);
}

TEST_F(EngineTest, WhatIsSubmittedEndsARequestAtIdleBeforeAStep) {
  Build({.kv_tokens = 20});
  const auto idle = Idle(Ask("", 10, 9));
  engine_->Step();
  const auto a = Submit(Ask("a", 10, 9));  // the pool has room for one
  EXPECT_EQ(idle->finished.front().status.code(), absl::StatusCode::kCancelled);
  ExpectNothingHeld();
  EXPECT_THAT(Step(), HasSubstr("first token a\n"));
  EXPECT_THAT(Idle(Ask("", 1, 1))->finished.front().status.code(), absl::StatusCode::kCancelled)
      << "something runs";
  RunAll();
  EXPECT_EQ(a->tokens.size(), 9u);
  const auto again = Idle(Ask("", 10, 9));
  engine_->EndIdle(absl::CancelledError("enough"));
  EXPECT_EQ(again->finished.front().status.message(), "enough");
  ExpectNothingHeld();
}

TEST_F(EngineTest, ARequestAtIdleTakesNoCachedPrefixesPlace) {
  Build({.kv_tokens = 20, .engine = {.max_prefix_bytes = 12 * kTokenBytes}});
  script_->prefix_bytes = 12 * kTokenBytes;
  EXPECT_EQ(Idle(Ask("", 8, 2))->finished.front().status.code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(engine_->idles());
  const auto idle = Idle(Ask("", 7, 2));
  EXPECT_EQ(script_->room_for_prefixes, 12 * kTokenBytes);
  RunAll();
  EXPECT_EQ(idle->tokens.size(), 2u);
}

TEST_F(EngineTest, ARequestAtIdleThatFailsHarmsNobody) {
  script_->on_open = [](const Request&) { return Boom(); };
  EXPECT_EQ(Idle(Ask("", 5, 3))->finished.front().status.message(), "boom");
  script_->on_open = nullptr;
  script_->on_forward = [](absl::Span<const WorkItem>) { return Boom(); };
  const auto idle = Idle(Ask("", 5, 3));
  engine_->Step();
  EXPECT_EQ(idle->finished.front().status.code(), absl::StatusCode::kInternal);
  EXPECT_FALSE(engine_->idles());
  ExpectNothingHeld();
  const auto left = Idle(Ask("", 5, 3));
  engine_.reset();
  EXPECT_EQ(left->finished.front().status.code(), absl::StatusCode::kCancelled);
}

RequestOptions Completions(RequestOptions options, int64_t n) {
  options.completions = n;
  options.sampling.temperature = 1;
  return options;
}

// The life of a request.

TEST_F(EngineTest, StreamsOneRequest) {
  Submit(Ask("a", 5, 3));
  EXPECT_EQ(engine_->waiting(), 1);
  EXPECT_EQ(Step(),
            "admitted a\n"
            "first token a\n"
            "a> tokens 5 'w5'\n"
            "step of 1: prefill 5, decode 0\n");
  EXPECT_EQ(engine_->waiting(), 0);
  EXPECT_EQ(engine_->running(), 1);
  EXPECT_EQ(Step(),
            "a> tokens 6 ' w6'\n"
            "step of 1: prefill 0, decode 1\n");
  EXPECT_EQ(Step(),
            "a> tokens 7 ' w7'\n"
            "a> length\n"
            "step of 1: prefill 0, decode 1\n");
  EXPECT_FALSE(engine_->Step());
  ExpectNothingHeld();
}

TEST_F(EngineTest, OneOutputTokenNeedsNoDecodeStep) {
  Submit(Ask("a", 5, 1));
  EXPECT_EQ(Step(),
            "admitted a\n"
            "first token a\n"
            "a> tokens 5 'w5'\n"
            "a> length\n"
            "step of 1: prefill 5, decode 0\n");
  ExpectNothingHeld();
}

TEST_F(EngineTest, LatecomersJoinTheBatch) {
  Submit(Ask("a", 5, 3));
  engine_->Step();
  Submit(Ask("b", 20, 2));
  Submit(Ask("c", 30, 2));
  EXPECT_EQ(Step(),
            "admitted b\n"
            "admitted c\n"
            "a> tokens 6 ' w6'\n"
            "first token b\n"
            "b> tokens 20 'w20'\n"
            "first token c\n"
            "c> tokens 30 'w30'\n"
            "step of 3: prefill 50, decode 1\n");
  EXPECT_EQ(Step(),
            "a> tokens 7 ' w7'\n"
            "a> length\n"
            "b> tokens 21 ' w21'\n"
            "b> length\n"
            "c> tokens 31 ' w31'\n"
            "c> length\n"
            "step of 3: prefill 0, decode 3\n");
  ExpectNothingHeld();
}

TEST_F(EngineTest, LongPromptIsCachedInChunks) {
  Build({.engine = {.scheduler = {.max_step_tokens = 40, .prefill_chunk_tokens = 16}}});
  RecordItems();
  Submit(Ask("a", 37, 2));
  RunAll();
  std::vector<std::string> items;
  for (const SeenItem& item : seen_) {
    items.push_back(absl::StrCat(item.first, "+", item.tokens.size(), " gives ", item.num_outputs,
                                 item.decode ? " decode" : "", item.evicts_prefill ? " evicts" : "",
                                 item.ends_prefill ? " ends" : ""));
  }
  EXPECT_THAT(items, ElementsAre("0+16 gives 0 evicts", "16+16 gives 0 evicts",
                                 "32+5 gives 1 evicts ends", "37+1 gives 1 decode"));
}

// Twelve long prompts of one tenant fill the engine when another's comes.
TEST_F(EngineTest, PromptsOfOneTenantDoNotHoldUpAnothers) {
  Build({.engine = {.scheduler = {.max_step_tokens = 64, .prefill_chunk_tokens = 64},
                    .max_running_requests = 16}});
  auto submit = [this](const std::string& tenant, int number) {
    RequestOptions options = Ask(absl::StrCat(tenant, number), 128, 1);
    options.scheduling.tenant = tenant;
    return Submit(options);
  };
  std::vector<std::shared_ptr<Output>> many;
  for (int i = 0; i < 12; ++i) many.push_back(submit("a", i));
  for (int i = 0; i < 5; ++i) engine_->Step();
  const auto other = submit("b", 0);
  for (int i = 0; i < 4; ++i) engine_->Step();
  EXPECT_TRUE(other->ended()) << "of every two steps one is his";
  EXPECT_EQ(std::count_if(many.begin(), many.end(), [](const auto& one) { return one->ended(); }),
            3);
  RunAll();
}

// Each of five may have a round at every step that comes to two fifths of what a step may compare.
TEST_F(EngineTest, RoundsOfOneStepAreBounded) {
  const int64_t pairs = std::get<Request>(admission_->Resolve(Ask("one", 20, 40, "pairs", 20)))
                            .demand.decode_round_pairs;
  ASSERT_GT(pairs, 0);
  Build({.engine = {.scheduler = {.max_round_pairs = pairs * 5 / 2}}});
  std::map<std::string, std::vector<int>> steps;
  int step = 0;
  script_->on_forward = [&](absl::Span<const WorkItem> items) {
    ++step;
    for (const WorkItem& item : items) steps[item.request->id].push_back(step);
    return absl::OkStatus();
  };
  const auto light = Submit(Ask("light", 20, 40));
  for (int i = 0; i < 5; ++i) Submit(Ask(absl::StrCat("costly ", i), 20, 40, "pairs", 20));
  RunAll();
  EXPECT_EQ(step, 100);
  std::vector<int> together(step + 1);
  for (const auto& [id, in] : steps) {
    ASSERT_EQ(in.size(), 40) << id;
    if (id == "light") {
      EXPECT_EQ(in.back(), 40) << "nobody's rounds hold it up";
      continue;
    }
    for (size_t i = 0; i < in.size(); ++i) {
      EXPECT_LE(in[i] - (i == 0 ? 0 : in[i - 1]), 3) << id << " waits for the other four";
      ++together[in[i]];
    }
  }
  EXPECT_EQ(*std::max_element(together.begin(), together.end()), 2);
}

// Those who come, with a costly prompt each, do not always go before one that is there; and costly
// prompts that wait keep no room from one that is not.
TEST_F(EngineTest, WhoComesWaitsForWhoIsThere) {
  const KvDemand demand =
      std::get<Request>(admission_->Resolve(Ask("one", 30, 9, "pairs", 20))).demand;
  ASSERT_LT(demand.decode_round_pairs, demand.prefill_round_pairs);
  Build({.engine = {
             .scheduler = {.max_step_tokens = 80, .max_round_pairs = demand.prefill_round_pairs}}});
  int steps_of_first = 0;
  script_->on_forward = [&](absl::Span<const WorkItem> items) {
    for (const WorkItem& item : items) steps_of_first += item.request->id == "first" ? 1 : 0;
    return absl::OkStatus();
  };
  Submit(Ask("first", 30, 9, "pairs", 20));
  engine_->Step();
  for (int i = 0; i < 12; ++i) {
    Submit(Ask(absl::StrCat("costly ", i), 30, 1, "pairs", 20));
    const auto light = Submit(Ask(absl::StrCat("light ", i), 40, 1));
    engine_->Step();
    EXPECT_TRUE(light->ended()) << i;
  }
  EXPECT_GE(steps_of_first, 4);
  RunAll();
}

TEST_F(EngineTest, KnownPrefixesAreNotPrefilled) {
  Build(
      {.engine = {.scheduler = {.prefill_chunk_tokens = 4}, .max_prefix_bytes = 3 * kTokenBytes}});
  script_->prefix = [](const Request&) { return int64_t{8}; };
  RequestOptions asked = Ask("a", 11, 2);
  asked.output.progress = true;
  const auto output = Submit(asked);
  EXPECT_EQ(Step(),
            "admitted a\n"
            "first token a\n"
            "a> tokens 11 'w11' 11 of 11\n"
            "step of 1: prefill 3, decode 0\n");
  RunAll();
  ASSERT_THAT(output->finished, SizeIs(1));
  EXPECT_EQ(output->finished[0].prompt_tokens, 11);
  EXPECT_EQ(output->finished[0].cached_prompt_tokens, 8);
  ExpectNothingHeld();
}

TEST_F(EngineTest, CachedPrefixesHaveWhatNobodyReserved) {
  Build({.kv_tokens = 20, .engine = {.max_prefix_bytes = 12 * kTokenBytes}});
  Submit(Ask("a", 3, 4));  // 6 tokens
  engine_->Step();
  EXPECT_EQ(script_->room_for_prefixes, 12 * kTokenBytes) << "all that they may have";
  script_->prefix_bytes = 12 * kTokenBytes;
  Submit(Ask("b", 12, 2));  // 13 tokens: they do not make it wait
  engine_->Step();
  EXPECT_EQ(engine_->running(), 2);
  EXPECT_EQ(script_->room_for_prefixes, kTokenBytes);
  EXPECT_EQ(observer_.steps.back().kv_prefix_bytes, 12 * kTokenBytes);
  RunAll();
  engine_->DropPrefixes();
  EXPECT_EQ(script_->prefix_bytes, 0);
}

// The fake executor's completion i begins i tokens further.
TEST_F(EngineTest, CompletionsShareThePromptAndPart) {
  const auto output = Submit(Completions(Ask("a", 5, 3), 3));
  EXPECT_EQ(Step(),
            "admitted a\n"
            "first token a\n"
            "a> tokens 5 'w5'\n"
            "a> tokens 6 'w6' of 1\n"
            "a> tokens 7 'w7' of 2\n"
            "step of 1: prefill 5, decode 0\n");
  EXPECT_EQ(engine_->running(), 3);
  EXPECT_EQ(script_->open_sequences, 3);
  EXPECT_EQ(script_->used_bytes, 3 * 5 * kTokenBytes);
  EXPECT_EQ(Step(),
            "a> tokens 6 ' w6'\n"
            "a> tokens 7 ' w7' of 1\n"
            "a> tokens 8 ' w8' of 2\n"
            "step of 3: prefill 0, decode 3\n");
  EXPECT_EQ(Step(),
            "a> tokens 7 ' w7'\n"
            "a> ended: length\n"
            "a> tokens 8 ' w8' of 1\n"
            "a> of 1 ended: length\n"
            "a> tokens 9 ' w9' of 2\n"
            "a> of 2 ended: length\n"
            "a> length\n"
            "step of 3: prefill 0, decode 3\n");
  ASSERT_THAT(output->finished, SizeIs(1));
  EXPECT_EQ(output->finished[0].output_tokens, 9);
  EXPECT_EQ(output->finished[0].kv.peak_bytes, 3 * 7 * kTokenBytes);
  ExpectNothingHeld();
}

TEST_F(EngineTest, CompletionsReserveWhatTheyCanHoldAndTakeAPlaceEach) {
  Build({.kv_tokens = 21, .engine = {.max_running_requests = 3}});
  Submit(Completions(Ask("a", 5, 3), 3));  // 3 x 7 tokens
  Submit(Ask("b", 1, 1));
  engine_->Step();
  EXPECT_EQ(engine_->ledger().reserved(), 21 * kTokenBytes);
  EXPECT_EQ(engine_->running(), 3);
  EXPECT_EQ(engine_->waiting(), 1);
  RunAll();
  EXPECT_THAT(observer_.admitted, testing::ElementsAre("a", "b"));
  ExpectNothingHeld();
}

TEST_F(EngineTest, CompletionsEndOneByOne) {
  RequestOptions asked = Completions(Ask("a", 5, 10), 3);
  asked.stop.tokens = {7};  // at once, after one, after two
  const auto output = Submit(asked);
  EXPECT_EQ(Step(),
            "admitted a\n"
            "first token a\n"
            "a> tokens 5 'w5'\n"
            "a> tokens 6 'w6' of 1\n"
            "a> tokens 7 of 2\n"
            "a> of 2 ended: stop token\n"
            "step of 1: prefill 5, decode 0\n");
  EXPECT_EQ(engine_->running(), 2);
  EXPECT_EQ(script_->open_sequences, 2) << "the third needed no KV";
  engine_->Step();
  EXPECT_EQ(engine_->running(), 1);
  RunAll();
  ASSERT_THAT(output->finished, SizeIs(1));
  EXPECT_EQ(output->finished[0].reason, FinishReason::kStopToken);
  EXPECT_EQ(output->finished[0].output_tokens, 3 + 2 + 1);
  ExpectNothingHeld();
}

TEST_F(EngineTest, CompletionsOfOneTokenAreNeverParted) {
  const auto output = Submit(Completions(Ask("a", 5, 1), 3));
  engine_->Step();
  ASSERT_THAT(output->finished, SizeIs(1));
  EXPECT_EQ(output->finished[0].output_tokens, 3);
  EXPECT_EQ(output->finished[0].kv.peak_bytes, 5 * kTokenBytes);
  ExpectNothingHeld();
}

TEST_F(EngineTest, CancelEndsAllCompletions) {
  for (int steps : {0, 1, 2, 3}) {
    const std::string id = absl::StrCat("a", steps);
    Build({.engine = {.scheduler = {.prefill_chunk_tokens = 4}}});
    const auto output = Submit(Completions(Ask(id, 6, 20), 3));
    for (int i = 0; i < steps; ++i) engine_->Step();
    EXPECT_TRUE(engine_->Cancel(id, absl::CancelledError("enough")));
    ASSERT_THAT(output->finished, SizeIs(1));
    EXPECT_EQ(output->finished[0].reason, FinishReason::kCancelled);
    EXPECT_EQ(engine_->running(), 0);
    ExpectNothingHeld();
  }
}

TEST_F(EngineTest, OneCompletionsFailureEndsAll) {
  int settled = 0;
  script_->on_settle = [&](const WorkItem& item) {
    return ++settled == 3 ? Boom() : absl::OkStatus();  // the second's first decode
  };
  const auto output = Submit(Completions(Ask("a", 6, 20), 3));
  RunAll();
  ASSERT_THAT(output->finished, SizeIs(1));
  EXPECT_EQ(output->finished[0].reason, FinishReason::kError);
  ExpectNothingHeld();
}

TEST_F(EngineTest, CompletionThatCannotBeginFailsAll) {
  int opened = 0;
  script_->on_open = [&](const Request&) { return ++opened == 3 ? Boom() : absl::OkStatus(); };
  const auto output = Submit(Completions(Ask("a", 6, 20), 4));
  const auto other = Submit(Ask("b", 3, 2));
  RunAll();
  ASSERT_THAT(output->finished, SizeIs(1));
  EXPECT_EQ(output->finished[0].reason, FinishReason::kError);
  ExpectNothingHeld();
}

TEST_F(EngineTest, ChunkCutShortDoesNotEvict) {
  Build({.engine = {.scheduler = {.max_step_tokens = 16, .prefill_chunk_tokens = 16}}});
  RecordItems();
  Submit(Ask("a", 10, 5));
  Submit(Ask("b", 40, 1));
  RunAll();
  ASSERT_EQ(seen_[1].id, "b");
  EXPECT_THAT(seen_[1].tokens, SizeIs(6));
  EXPECT_FALSE(seen_[1].evicts_prefill);
}

TEST_F(EngineTest, DrawsAreNumberedByOutput) {
  RecordItems();
  Submit(Ask("a", 5, 4));
  RunAll();
  std::vector<int64_t> draws;
  for (const SeenItem& item : seen_) draws.push_back(item.draw);
  EXPECT_THAT(draws, ElementsAre(0, 1, 2, 3));
}

TEST_F(EngineTest, DrawsKnowTheOutputBeforeThem) {
  RecordItems();
  Submit(Ask("a", 5, 4));
  RunAll();
  ASSERT_THAT(seen_, SizeIs(4));
  EXPECT_THAT(seen_[0].outputs, IsEmpty());
  EXPECT_THAT(seen_[1].outputs, ElementsAre(5));
  EXPECT_THAT(seen_[3].outputs, ElementsAre(5, 6, 7));
}

TEST_F(EngineTest, WorkStaysReadableUntilItHasSettled) {
  std::map<std::string, std::vector<int32_t>> forwarded;
  script_->on_item = [&](const WorkItem& item) {
    forwarded[item.request->id].assign(item.tokens.begin(), item.tokens.end());
    return absl::OkStatus();
  };
  int settled = 0;
  script_->on_settle = [&](const WorkItem& item) {
    const std::vector<int32_t> tokens(item.tokens.begin(), item.tokens.end());
    EXPECT_EQ(tokens, forwarded[item.request->id]);
    ++settled;
    return absl::OkStatus();
  };
  Submit(Ask("a", 5, 60));
  Submit(Ask("b", 17, 33));
  RunAll();
  EXPECT_EQ(settled, 59 - 1 + 32);  // a ends at 63
}

// Admission.

TEST_F(EngineTest, HeadOfTheQueueWaitsForRoomAndNobodyPasses) {
  Build({.kv_tokens = 100});
  Submit(Ask("a", 50, 11));  // 60 tokens
  Submit(Ask("b", 40, 11));  // 50
  Submit(Ask("c", 5, 2));    // 6
  EXPECT_THAT(Step(), AllOf(HasSubstr("admitted a"), Not(HasSubstr("admitted b")),
                            Not(HasSubstr("admitted c"))));
  EXPECT_EQ(engine_->waiting(), 2);
  EXPECT_EQ(engine_->outlook().waiting.total().tokens, 51 + 7);
  RunAll();
  EXPECT_THAT(observer_.admitted, ElementsAre("a", "b", "c"));
}

TEST_F(EngineTest, PoolFillsToTheLastByte) {
  Build({.kv_tokens = 100});
  Submit(Ask("a", 50, 11));
  Submit(Ask("b", 30, 11));
  engine_->Step();
  EXPECT_EQ(engine_->ledger().reserved(), engine_->ledger().capacity());
  EXPECT_EQ(engine_->running(), 2);
}

TEST_F(EngineTest, RunningRequestsAreBounded) {
  Build({.engine = {.max_running_requests = 2}});
  for (const char* id : {"a", "b", "c"}) Submit(Ask(id, 5, 2));
  engine_->Step();
  EXPECT_EQ(engine_->running(), 2);
  EXPECT_EQ(engine_->waiting(), 1);
  RunAll();
  EXPECT_THAT(observer_.admitted, ElementsAre("a", "b", "c"));
}

TEST_F(EngineTest, ReservationShrinksWhenThePromptHasSettled) {
  Build({.kv_tokens = 250});
  Submit(Ask("a", 200, 20, "at_end", 40));  // 200 tokens, then 41
  engine_->Step();
  EXPECT_EQ(engine_->ledger().reserved(), 41 * kTokenBytes);
  Submit(Ask("b", 200, 10));  // 209
  EXPECT_THAT(Step(), HasSubstr("admitted b"));
}

}  // namespace engine_test
}  // namespace epikv
