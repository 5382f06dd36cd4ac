#include "runtime/engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "runtime/base/reason.h"
#include "tests/fixtures/engine_fixture.h"

namespace epikv {
namespace engine_deadlines_test {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::Pair;
using testing::UnorderedElementsAre;

// Deadlines.

TEST_F(EngineTest, DeadlineEndsAQueuedRequest) {
  Build({.engine = {.max_running_requests = 1}});
  Submit(Ask("a", 5, 10));
  RequestOptions options = Ask("b", 5, 3);
  options.deadline = now_ + absl::Seconds(10);
  Submit(options);
  engine_->Step();
  EXPECT_EQ(engine_->NextDeadline(), options.deadline);
  now_ = options.deadline - absl::Nanoseconds(1);
  EXPECT_THAT(Step(), Not(HasSubstr("b>")));
  now_ = options.deadline;
  EXPECT_EQ(Step(),
            "b> deadline: DEADLINE_EXCEEDED: the deadline passed in the queue\n"
            "a> tokens 7 ' w7'\n"
            "step of 1: prefill 0, decode 1\n");
  EXPECT_EQ(outputs_["b"]->finished.at(0).timings.queue, absl::Seconds(10));
  EXPECT_EQ(engine_->NextDeadline(), absl::InfiniteFuture());
}

TEST_F(EngineTest, DeadlineEndsARunningRequestAndFreesItsKv) {
  RequestOptions options = Ask("a", 5, 100);
  options.deadline = now_ + absl::Seconds(10);
  auto output = Submit(options);
  engine_->Step();
  engine_->Step();
  now_ += absl::Seconds(11);
  EXPECT_EQ(Step(), "a> deadline: DEADLINE_EXCEEDED: the deadline passed while running\n");
  ExpectNothingHeld();
  EXPECT_EQ(output->finished.at(0).output_tokens, 2);
}

TEST_F(EngineTest, DeadlineEndsAPausedRequest) {
  RequestOptions options = Ask("a", 5, 100);
  options.deadline = now_ + absl::Seconds(10);
  Submit(options)->ready = false;
  EXPECT_FALSE(engine_->Step());
  EXPECT_EQ(engine_->NextDeadline(), options.deadline);
  now_ += absl::Seconds(10);
  EXPECT_FALSE(engine_->Step());
  EXPECT_EQ(outputs_["a"]->reason(), "deadline");
  ExpectNothingHeld();
}

TEST_F(EngineTest, DeadlineThatHasPassedIsNeverAdmitted) {
  RequestOptions options = Ask("a", 5, 100);
  options.deadline = now_ - absl::Seconds(1);
  Submit(options);
  EXPECT_THAT(Step(), Not(HasSubstr("admitted")));
  EXPECT_EQ(outputs_["a"]->reason(), "deadline");
}

// Deadlines that cannot be met.

class EngineDeadlineTest : public EngineTest {
 protected:
  // A step takes 10 ms, whatever it runs.
  EngineDeadlineTest() {
    script_->next = [](int32_t) { return 5; };  // no ends
    script_->on_forward = [this](absl::Span<const WorkItem>) {
      now_ += step_time_;
      return absl::OkStatus();
    };
  }
  // 21 steps, so that the pace is known: a step a token, and outputs are as long as they may be.
  void Measure() {
    Submit(Ask("measured", 5, 21));
    RunAll();
  }
  RequestOptions AskWithin(const std::string& id, int64_t max_output, absl::Duration time) {
    RequestOptions options = Ask(id, 5, max_output);
    options.stop.ignore_end = true;  // nothing ends it sooner
    options.deadline = now_ + time;
    return options;
  }
  static std::string ReasonOfEnd(const Output& output) {
    return ReasonOf(output.finished.at(0).status);
  }

  absl::Duration step_time_ = absl::Milliseconds(10);
};

TEST_F(EngineDeadlineTest, WaitingRequestIsDroppedWhenItsTimeIsTooShort) {
  Build({.engine = {.max_running_requests = 1}});
  Measure();
  Submit(Ask("running", 5, 100));
  const auto waiting = Submit(AskWithin("waiting", 21, absl::Milliseconds(500)));
  engine_->Step();
  // Of 500 ms it needs 200, for 20 steps after that of its prompt, which is too short to know of.
  const absl::Time last = now_ - step_time_ + absl::Milliseconds(300);
  while (!waiting->ended()) engine_->Step();
  EXPECT_GT(now_, last);
  EXPECT_LE(now_, last + 2 * step_time_);
  EXPECT_EQ(waiting->reason(), "deadline");
  EXPECT_EQ(ReasonOfEnd(*waiting), kDeadlineInfeasible);
  EXPECT_THAT(MetadataOf(waiting->finished.at(0).status),
              UnorderedElementsAre(Pair("seconds_left", "0.190"), Pair("wait_seconds", "0.000"),
                                   Pair("run_seconds", "0.200")));
  EXPECT_THAT(observer_.admitted, ElementsAre("measured", "running"));
}

TEST_F(EngineDeadlineTest, TimeThatJustSufficesIsUsed) {
  Measure();
  const auto output = Submit(AskWithin("a", 21, absl::Milliseconds(210)));
  RunAll();
  EXPECT_EQ(output->reason(), "length");
}

TEST_F(EngineDeadlineTest, NothingIsDroppedBeforeThePaceIsKnown) {
  const auto output = Submit(AskWithin("a", 2000, absl::Milliseconds(45)));
  RunAll();
  EXPECT_EQ(output->tokens.size(), 5);
  EXPECT_EQ(ReasonOfEnd(*output), "");
}

// What other requests used says nothing of this one: it may end at its next token.
TEST_F(EngineDeadlineTest, RequestThatMayEndByItselfMayTry) {
  Measure();
  RequestOptions options = AskWithin("a", 2000, absl::Milliseconds(45));
  options.stop.ignore_end = false;
  const auto output = Submit(options);
  RunAll();
  EXPECT_EQ(output->tokens.size(), 5);
}

TEST_F(EngineDeadlineTest, NothingIsDroppedWhereThatIsNotWanted) {
  Build({.engine = {.refuse_infeasible_deadlines = false}});
  Measure();
  const auto output = Submit(AskWithin("a", 2000, absl::Milliseconds(45)));
  RunAll();
  EXPECT_EQ(output->tokens.size(), 5);
}

TEST_F(EngineDeadlineTest, WaitingForCoresIsAPartOfThePresentPace) {
  Measure();
  Submit(Ask("a", 5, 2000));
  const double alone = engine_->outlook().present.SecondsOf(0, 100);
  for (int i = 0; i < 600; ++i) engine_->Step(/*waited=*/3 * step_time_);
  EXPECT_NEAR(engine_->outlook().present.SecondsOf(0, 100), 4 * alone, .1 * alone);
  EXPECT_DOUBLE_EQ(engine_->outlook().best.SecondsOf(0, 100), alone) << "it may be alone again";
}

// The best pace is not the present one: whether to go by that depends on whether it was too slow.
TEST_F(EngineDeadlineTest, PresentPaceCountsOnceDeadlinesWereMissedInCompany) {
  Measure();
  step_time_ = absl::Milliseconds(40);
  const auto neighbour = Submit(Ask("neighbour", 5, 2000));
  for (int i = 0; i < 200; ++i) engine_->Step();
  const auto missed = Submit(AskWithin("missed", 21, absl::Milliseconds(400)));
  while (!missed->ended()) engine_->Step();
  EXPECT_GT(missed->tokens.size(), 0);
  EXPECT_EQ(ReasonOfEnd(*missed), "") << "at the best pace it would have been in time";
  const auto dropped = Submit(AskWithin("dropped", 21, absl::Milliseconds(400)));
  engine_->Step();
  EXPECT_EQ(dropped->reason(), "deadline");
  EXPECT_EQ(ReasonOfEnd(*dropped), kDeadlineInfeasible);
  EXPECT_EQ(dropped->tokens.size(), 0);
  const auto patient = Submit(AskWithin("patient", 21, absl::Seconds(2)));
  while (!patient->ended()) engine_->Step();
  EXPECT_EQ(patient->reason(), "length");
  ASSERT_TRUE(engine_->Cancel("neighbour", absl::CancelledError("")));
  // Alone, it would wait for nobody: it may try.
  const auto alone = Submit(AskWithin("alone", 21, absl::Milliseconds(400)));
  RunAll();
  EXPECT_GT(alone->tokens.size(), 0);
}

TEST_F(EngineTest, KvOfAnExpiredRequestAdmitsTheNextInTheSameStep) {
  Build({.kv_tokens = 20});
  RequestOptions options = Ask("a", 10, 11);
  options.deadline = now_ + absl::Seconds(1);
  Submit(options);
  Submit(Ask("b", 10, 11));
  engine_->Step();
  now_ += absl::Seconds(1);
  EXPECT_THAT(Step(), HasSubstr("admitted b\nfirst token b\n"));
}

}  // namespace engine_deadlines_test
}  // namespace epikv
