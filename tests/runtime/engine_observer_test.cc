#include "runtime/engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/fixtures/engine_fixture.h"

namespace epikv {
namespace engine_observer_test {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::SizeIs;

// What the observer sees.

TEST_F(EngineTest, StepsTellWhatIsHeld) {
  Build({.kv_tokens = 50, .engine = {.max_running_requests = 1}});
  Submit(Ask("a", 5, 10));
  Submit(Ask("b", 5, 10));
  engine_->Step();
  const StepStats& step = observer_.steps.back();
  EXPECT_EQ(step.running, 1);
  EXPECT_EQ(step.waiting, 1);
  EXPECT_EQ(step.kv_used_bytes, 5 * kTokenBytes);
  EXPECT_EQ(step.kv_reserved_bytes, 14 * kTokenBytes);
  EXPECT_EQ(step.kv_capacity_bytes, 50 * kTokenBytes);
}

TEST_F(EngineTest, WhatEndsWithoutAStepShows) {
  Submit(Ask("a", 5, 10));
  engine_->Step();
  engine_->Cancel("a", absl::CancelledError(""));
  EXPECT_FALSE(engine_->Step());
  EXPECT_EQ(observer_.steps.back().sequences, 0);
  EXPECT_EQ(observer_.steps.back().running, 0);
  EXPECT_EQ(observer_.steps.back().kv_used_bytes, 0);
  EXPECT_EQ(observer_.steps.back().kv_reserved_bytes, 0);
}

TEST_F(EngineTest, EvictionsAreTold) {
  Build({.engine = {.scheduler = {.prefill_chunk_tokens = 8}}});
  Submit(Ask("a", 16, 4, "by_chunk", 10));
  EXPECT_THAT(Step(), Not(HasSubstr("evicted")));
  EXPECT_THAT(Step(), HasSubstr("evicted a 24 in prefill\n"));
  EXPECT_THAT(Step(), HasSubstr("evicted a 4\n"));
}

TEST_F(EngineTest, PolicyThatSeesThePromptFirstEvictsAtItsEnd) {
  Build({.engine = {.scheduler = {.prefill_chunk_tokens = 8}}});
  Submit(Ask("a", 20, 4, "at_end", 10));
  EXPECT_THAT(Step(), Not(HasSubstr("evicted")));
  EXPECT_THAT(Step(), Not(HasSubstr("evicted")));
  EXPECT_THAT(Step(), HasSubstr("evicted a 40 in prefill\n"));
}

TEST_F(EngineTest, RequestThatHasEndedIsNotEvictedInVain) {
  int settled = 0;
  script_->on_settle = [&](const WorkItem&) {
    ++settled;
    return absl::OkStatus();
  };
  Submit(Ask("a", 20, 1, "by_chunk", 10));
  EXPECT_THAT(Step(), Not(HasSubstr("evicted")));
  EXPECT_EQ(settled, 0);
}

TEST_F(EngineTest, VictimsAreTracedOnRequest) {
  RequestOptions options = Ask("a", 8, 5, "by_chunk", 8);
  options.kv.protection = {.prompt = false, .sinks = 1, .recent = 2};
  Submit(options);
  options.id = "b";
  options.output.kv_trace = true;
  Submit(options);
  engine_->Step();
  EXPECT_EQ(Step(),
            "a> tokens 9 ' w9'\n"
            "b> tokens 9 ' w9'\n"
            "evicted a 4\n"
            "evicted b 4\n"
            "b> at 8 evicted 1\n"
            "step of 2: prefill 0, decode 2\n");
  EXPECT_THAT(Step(), HasSubstr("b> at 9 evicted 2\n"));
}

TEST_F(EngineTest, TraceIsCutAtItsLimitAndSaysSo) {
  Build({.engine = {.max_trace_victims = 3}});
  RequestOptions options = Ask("a", 8, 4, "by_chunk", 8);
  options.output.kv_trace = true;
  const auto within = Submit(options);  // 2 victims: the last token is not settled
  options = Ask("b", 8, 10, "by_chunk", 8);
  options.output.kv_trace = true;
  const auto beyond = Submit(options);
  RunAll();
  EXPECT_THAT(within->evictions, SizeIs(2));
  EXPECT_FALSE(within->finished.at(0).kv_trace_truncated);
  EXPECT_THAT(beyond->evictions, SizeIs(3));
  EXPECT_TRUE(beyond->finished.at(0).kv_trace_truncated);
  EXPECT_EQ(beyond->finished.at(0).kv.rounds, 8) << "what is not traced still counts";
}

TEST_F(EngineTest, ResidualStepsBelongToTheTokensInOrder) {
  RequestOptions options = Ask("a", 5, 4);
  options.output.residual_steps = true;
  const auto output = Submit(options);
  RunAll();
  EXPECT_THAT(output->tokens, ElementsAre(5, 6, 7, 8));
  // The fake's first channel is the token; the last token is never cached.
  EXPECT_THAT(output->residual_steps,
              ElementsAre(ElementsAre(5, 1), ElementsAre(6, 1), ElementsAre(7, 1)));
}

}  // namespace engine_observer_test
}  // namespace epikv
