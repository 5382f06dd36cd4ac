#include "runtime/admission/forecast.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>

namespace epikv {
namespace forecast_test {

using ::testing::DoubleNear;

Request Asked(int64_t prompt, int64_t max_output, int64_t bytes = 100) {
  Request request{.prompt = std::vector<int32_t>(prompt, 0), .max_output_tokens = max_output};
  request.demand = {.prefill_bytes = bytes, .decode_bytes = bytes};
  return request;
}

// Prefill: 1 ms a token; decode: 10 ms a token, of which half of the most are used.
constexpr Pace kPace{
    .seconds_per_prefill_token = .001, .seconds_per_decode_token = .01, .decode_share = .5};

PaceMeter Measured() {
  PaceMeter meter;
  for (int i = 0; i < 16; ++i) meter.OnStep(absl::Milliseconds(10), 0, 1);
  return meter;
}

TEST(PaceMeterTest, SaysNothingBeforeItHasSeenSteps) {
  PaceMeter meter;
  for (int i = 0; i < 15; ++i) meter.OnStep(absl::Milliseconds(10), 0, 1);
  EXPECT_FALSE(meter.measured());
  meter.OnStep(absl::Milliseconds(-10), 0, 1);
  EXPECT_FALSE(meter.measured()) << "a clock that was set is no step";
  meter.OnStep(absl::Milliseconds(10), 0, 1);
  EXPECT_TRUE(meter.measured());
}

TEST(PaceMeterTest, BestIsTheFastestAndPresentFollows) {
  PaceMeter meter = Measured();
  meter.OnStep(absl::Milliseconds(4), 0, 3);
  meter.OnStep(absl::Milliseconds(100), 50, 0);
  EXPECT_DOUBLE_EQ(meter.best().seconds_per_decode_token, .004);
  EXPECT_EQ(meter.best().seconds_per_prefill_token, 0)
      << "of so few tokens the step's own cost is most";
  meter.OnStep(absl::Milliseconds(200), 100, 0);
  EXPECT_DOUBLE_EQ(meter.best().seconds_per_prefill_token, .002);
  for (int i = 0; i < 300; ++i) meter.OnStep(absl::Milliseconds(50), 10, 8);
  EXPECT_DOUBLE_EQ(meter.best().seconds_per_decode_token, .004);
  EXPECT_THAT(meter.present().seconds_per_decode_token, DoubleNear(.05, .001));
  EXPECT_THAT(meter.present().seconds_per_prefill_token, DoubleNear(.005, .0001));
}

TEST(PaceMeterTest, StreamsThatHadSeveralTokensOfAStepWereFaster) {
  PaceMeter meter = Measured();
  for (int i = 0; i < 300; ++i) meter.OnStep(absl::Milliseconds(12), 0, 6, {.most = 4, .mean = 3});
  EXPECT_DOUBLE_EQ(meter.best().seconds_per_decode_token, .003) << "no stream was faster";
  EXPECT_THAT(meter.present().seconds_per_decode_token, DoubleNear(.004, .0001));
}

TEST(PaceMeterTest, OneStepThatWasStoppedSaysNothingOfTheNext) {
  PaceMeter meter = Measured();
  meter.OnStep(absl::Milliseconds(100), 100, 0);
  meter.OnStep(absl::Seconds(600), 0, 1);
  meter.OnStep(absl::Seconds(600), 100, 1);
  EXPECT_LT(meter.present().seconds_per_decode_token, .05);
  EXPECT_LT(meter.present().seconds_per_prefill_token, .01);
  for (int i = 0; i < 200; ++i) meter.OnStep(absl::Seconds(2), 0, 1);
  EXPECT_THAT(meter.present().seconds_per_decode_token, DoubleNear(2, .1)) << "it stays slow";
}

TEST(PaceMeterTest, OutputsOfLateSayHowMuchOfTheMostIsUsed) {
  PaceMeter meter = Measured();
  EXPECT_EQ(meter.best().decode_share, 0) << "the next may end at once";
  EXPECT_EQ(meter.present().decode_share, 1);
  meter.OnOutput(10, 100);
  for (int i = 0; i < 63; ++i) meter.OnOutput(100, 100);
  EXPECT_DOUBLE_EQ(meter.best().decode_share, .1);
  EXPECT_THAT(meter.present().decode_share, DoubleNear(.986, .001));
  meter.OnOutput(50, 100);
  EXPECT_DOUBLE_EQ(meter.best().decode_share, .5) << "the short one is 64 outputs ago";
  meter.OnOutput(0, 0);
  EXPECT_DOUBLE_EQ(meter.best().decode_share, .5) << "nothing could be decoded";
}

TEST(PaceMeterTest, PromptsOfLateSayHowMuchOfThemIsPrefilled) {
  PaceMeter meter = Measured();
  EXPECT_EQ(meter.best().prefill_share, 1);
  EXPECT_EQ(meter.present().prefill_share, 1);
  meter.OnPrompt(10, 100);
  for (int i = 0; i < 63; ++i) meter.OnPrompt(100, 100);
  EXPECT_DOUBLE_EQ(meter.best().prefill_share, .1);
  EXPECT_THAT(meter.present().prefill_share, DoubleNear(.986, .001));
  meter.OnPrompt(50, 100);
  EXPECT_DOUBLE_EQ(meter.best().prefill_share, .5) << "the short one is 64 prompts ago";
}

TEST(PaceMeterTest, MissedDeadlinesAreForgotten) {
  PaceMeter meter = Measured();
  meter.OnDeadline(false);
  EXPECT_FALSE(meter.missing());
  meter.OnDeadline(true);
  for (int i = 0; i < 63; ++i) meter.OnDeadline(false);
  EXPECT_TRUE(meter.missing());
  meter.OnDeadline(false);
  EXPECT_FALSE(meter.missing());
}

TEST(WorkTest, RequestRunsForItsPromptAndItsOutputAfterTheFirst) {
  EXPECT_EQ(PredictRun(Asked(100, 1), kPace), absl::Milliseconds(100));
  EXPECT_EQ(PredictRun(Asked(100, 21), kPace), absl::Milliseconds(200));
  Request scored = Asked(100, 21);
  scored.forced = std::vector<int32_t>(21, 0);
  scored.force_in_chunks = true;
  EXPECT_EQ(PredictRun(scored, kPace), absl::Milliseconds(120)) << "20 of them in chunks";
}

TEST(WorkTest, WhatIsLeftOfARunningRequest) {
  auto seconds_left = [](int64_t cached, int64_t outputs) {
    const Work left = WorkLeft(Asked(100, 41), cached, outputs, kPace);
    EXPECT_DOUBLE_EQ(kPace.SecondsOf(left.byte_prefill, left.byte_decode),
                     100 * kPace.SecondsOf(left.prefill, left.decode));
    return kPace.SecondsOf(left.prefill, left.decode);
  };
  EXPECT_DOUBLE_EQ(seconds_left(0, 0), .1 + .2);
  EXPECT_DOUBLE_EQ(seconds_left(60, 0), .04 + .2);
  EXPECT_DOUBLE_EQ(seconds_left(100, 11), .1);
  EXPECT_DOUBLE_EQ(seconds_left(100, 30), 0) << "longer than most: any step may be its last";
}

TEST(WorkTest, CachedPrefixesShortenPrompts) {
  Pace pace = kPace;
  pace.prefill_share = .25;
  EXPECT_EQ(PredictRun(Asked(100, 1), pace), absl::Milliseconds(25));
  EXPECT_EQ(PredictLeastRun(Asked(100, 1), pace), absl::Milliseconds(25));
  const Work left = WorkLeft(Asked(100, 1), 60, 0, pace);
  EXPECT_DOUBLE_EQ(pace.SecondsOf(left.prefill, left.decode), .04)
      << "of what runs, it is known what is cached";
}

TEST(BacklogTest, AheadAreHigherClassesOwnTenantAndTheSharesOfOthers) {
  Backlog backlog;
  const Work work = WorkOf(Asked(60, 40));  // 100 tokens
  auto add = [&](const std::string& tenant, Priority priority, int times) {
    for (int i = 0; i < times; ++i) backlog.Add({.priority = priority, .tenant = tenant}, work);
  };
  add("a", Priority::kLow, 8);
  add("a", Priority::kNormal, 2);
  add("b", Priority::kNormal, 20);
  add("c", Priority::kNormal, 1);
  add("d", Priority::kHigh, 3);
  EXPECT_EQ(backlog.total().requests, 34);
  // Three of a's, the new one with them: as many of b's, and c's only one.
  const auto normal = backlog.AheadOf({.tenant = "a"}, 100, 50);
  EXPECT_DOUBLE_EQ(normal.likely.requests, 3 + 2 + 3 + 1);
  // But for a quantum and a request: 150 of b's tokens.
  EXPECT_DOUBLE_EQ(normal.least.requests, 3 + 2 + 1.5 + 1);
  EXPECT_TRUE(normal.higher);
  const auto high = backlog.AheadOf({.priority = Priority::kHigh, .tenant = "d"}, 100, 50);
  EXPECT_EQ(high.likely.requests, 3);
  EXPECT_FALSE(high.higher);
}

// A tenant that waits with a large request has saved for it while the others were served.
TEST(BacklogTest, WhatATenantSavedForItsLargeRequestIsNotCountedTwice) {
  Backlog backlog;
  backlog.Add({.tenant = "own"}, WorkOf(Asked(900, 100)));
  for (int i = 0; i < 20; ++i) backlog.Add({.tenant = "peer"}, WorkOf(Asked(50, 50)));
  EXPECT_EQ(backlog.AheadOf({.tenant = "own"}, 10, 50).least.tokens, 1000)
      << "its own, and of the peer nothing is sure";
}

TEST(BacklogTest, AddsUp) {
  Backlog one, other;
  one.Add({.tenant = "a"}, WorkOf(Asked(10, 10)));
  other.Add({.tenant = "a"}, WorkOf(Asked(30, 10)));
  other.Add({.priority = Priority::kHigh, .tenant = "b"}, WorkOf(Asked(5, 5)));
  one += other;
  EXPECT_EQ(one.total().tokens, 70);
  EXPECT_EQ(one.AheadOf({.tenant = "a"}, 0, 1).likely.tokens, 70);
  EXPECT_EQ(one.AheadOf({.tenant = "a"}, 0, 1).likely.most_tokens, 40);
}

// Half of a pool of 1000 bytes in use; four places, one free.
Outlook HalfFull() {
  return {.at = absl::FromUnixSeconds(1000),
          .measured = true,
          .best = kPace,
          .present = kPace,
          .room = {.places = 4, .free_places = 1, .bytes = 1000, .free_bytes = 500},
          .running_best = WorkOf(Asked(100, 21, 500)),
          .running_present = WorkOf(Asked(100, 21, 500)),
          .ageing = absl::Seconds(30),
          .quantum_tokens = 100};
}

TEST(ForecastTest, NobodyWaitsWhereThereIsRoom) {
  Outlook outlook = HalfFull();
  const Forecast forecast = Predict(outlook, Asked(100, 21, 500), outlook.at);
  EXPECT_EQ(forecast.wait, absl::ZeroDuration());
  EXPECT_EQ(forecast.least_wait, absl::ZeroDuration());
  EXPECT_EQ(forecast.least_run, absl::Milliseconds(100)) << "it may end by itself";
  Request at_least = Asked(100, 21, 500);
  at_least.min_output_tokens = 11;
  EXPECT_EQ(Predict(outlook, at_least, outlook.at).least_run, absl::Milliseconds(200));
  Request endless = Asked(100, 21, 500);
  endless.ignore_end = true;
  EXPECT_EQ(Predict(outlook, endless, outlook.at).least_run, absl::Milliseconds(300));
  endless.stop_strings = {"x"};
  EXPECT_EQ(Predict(outlook, endless, outlook.at).least_run, absl::Milliseconds(100));
  Request scored = Asked(100, 21, 500);
  scored.forced.assign(21, 0);
  EXPECT_EQ(Predict(outlook, scored, outlook.at).least_run, absl::Milliseconds(300));
  EXPECT_EQ(forecast.position, 0);
  outlook.measured = false;
  EXPECT_EQ(Predict(outlook, Asked(100, 21, 500), outlook.at).wait, absl::ZeroDuration());
}

TEST(ForecastTest, NothingIsSaidBeforeItWasMeasured) {
  Outlook outlook = HalfFull();
  outlook.measured = false;
  const Forecast forecast = Predict(outlook, Asked(100, 21, 501), outlook.at);
  EXPECT_EQ(forecast.wait, std::nullopt);
  EXPECT_EQ(forecast.least_wait + forecast.least_run, absl::ZeroDuration());
  outlook.waiting.Add({}, WorkOf(Asked(1, 1)));
  EXPECT_EQ(PredictWaitBehindAll(outlook), std::nullopt);
}

TEST(ForecastTest, WaitsForRoomInThePool) {
  Outlook outlook = HalfFull();
  // 500 bytes for 200 ms run, 250 bytes four times for 400 ms wait: all done after 500 ms if the
  // pool is never idle. The last of them may then have begun 400 ms before.
  for (int i = 0; i < 4; ++i) outlook.waiting.Add({}, WorkOf(Asked(100, 61, 250)));
  const Forecast forecast = Predict(outlook, Asked(100, 21, 250), outlook.at);
  EXPECT_EQ(forecast.position, 4);
  EXPECT_EQ(forecast.least_wait, absl::Milliseconds(100));
  EXPECT_EQ(forecast.wait, absl::Milliseconds(300));
  // What was done since the last step is done.
  const absl::Time later = outlook.at + absl::Milliseconds(150);
  EXPECT_EQ(Predict(outlook, Asked(100, 21, 250), later).wait, absl::Milliseconds(150));
  EXPECT_EQ(Predict(outlook, Asked(100, 21, 250), later).least_wait, absl::ZeroDuration());
  EXPECT_EQ(PredictWaitBehindAll(outlook), absl::Milliseconds(300));
}

TEST(ForecastTest, WaitsForAPlace) {
  Outlook outlook = HalfFull();
  outlook.room.bytes = outlook.room.free_bytes = 1e9;
  // 200 ms run and 800 ms wait, in four places.
  for (int i = 0; i < 4; ++i) outlook.waiting.Add({}, WorkOf(Asked(100, 21)));
  const Forecast forecast = Predict(outlook, Asked(100, 21), outlook.at);
  EXPECT_EQ(forecast.least_wait, absl::Milliseconds(50));
  EXPECT_EQ(forecast.wait, absl::Milliseconds(150));
}

TEST(ForecastTest, HigherClassesHoldItUpNoLongerThanItTakesToRise) {
  Outlook outlook = HalfFull();
  outlook.ageing = absl::Milliseconds(10);
  for (int i = 0; i < 100; ++i) {
    outlook.waiting.Add({.priority = Priority::kHigh}, WorkOf(Asked(100, 61, 250)));
  }
  const Forecast forecast = Predict(outlook, Asked(100, 21, 250), outlook.at);
  EXPECT_EQ(forecast.least_wait, absl::Milliseconds(10));
  EXPECT_GT(*forecast.wait, absl::Seconds(9));
}

// Retries.

class RetryTimesTest : public ::testing::Test {
 protected:
  RetryTimesTest() { outlook_.room.free_places = 0; }
  absl::Duration After(const Request& request, absl::Duration late = absl::ZeroDuration()) {
    return retries_.After(late, WorkOf(request), outlook_, now_);
  }

  Outlook outlook_ = HalfFull();
  absl::Time now_ = outlook_.at;
  RetryTimes retries_;
};

TEST_F(RetryTimesTest, InABurstEachComesInItsTurn) {
  // 700 ms each, and four at once, of which half come anew.
  EXPECT_EQ(After(Asked(100, 121)), absl::Milliseconds(350));
  EXPECT_EQ(After(Asked(100, 121)), absl::Milliseconds(700));
  EXPECT_EQ(After(Asked(100, 121), absl::Seconds(5)), absl::Milliseconds(6050));
  EXPECT_EQ(After(Asked(100, 121)), absl::Milliseconds(1400));
  outlook_.room.free_places = 2;
  EXPECT_EQ(After(Asked(100, 121)), absl::Milliseconds(3500)) << "as things are, two at once";
}

TEST_F(RetryTimesTest, DelaysGrowAsTheOverloadLastsAndAreForgottenAfterIt) {
  const absl::Duration first = After(Asked(100, 121));
  absl::Duration last;
  for (int i = 0; i < 100; ++i) {
    now_ += absl::Milliseconds(500);
    last = After(Asked(100, 121));
  }
  EXPECT_GT(last, 100 * first);
  now_ += absl::Seconds(25);  // after 50
  EXPECT_GT(After(Asked(100, 121)), last) << "it may only have paused";
  now_ += absl::Seconds(40);  // after 76
  EXPECT_EQ(After(Asked(100, 121)), first);
}

TEST_F(RetryTimesTest, AreBounded) {
  EXPECT_EQ(After(Asked(1, 1)), absl::Milliseconds(100));
  EXPECT_EQ(After(Asked(1, 1), absl::Hours(1)), absl::Minutes(5));
  outlook_.measured = false;
  EXPECT_EQ(After(Asked(1, 1)), absl::Seconds(1));
}

}  // namespace forecast_test
}  // namespace epikv
