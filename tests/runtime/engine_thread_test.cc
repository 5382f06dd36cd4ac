#include "runtime/engine/engine_thread.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "runtime/admission/admission.h"
#include "runtime/base/reason.h"
#include "runtime/base/steady_time.h"
#include "runtime/base/when_idle.h"
#include "runtime/text/tokenizer.h"
#include "tests/fixtures/fake_executor.h"
#include "tests/fixtures/fake_model.h"
#include "tests/fixtures/fake_policies.h"

namespace epikv {
namespace engine_thread_test {

constexpr absl::Duration kGenerous = absl::Seconds(60);  // only a broken test waits so long

// Holds the engine's thread in its next forward until it is opened.
class Gate {
 public:
  ~Gate() { Open(); }
  void Pass() {
    absl::MutexLock lock(&mu_);
    held_ = !open_;
    mu_.Await(absl::Condition(&open_));
    held_ = false;
  }
  void AwaitHeld() {
    absl::MutexLock lock(&mu_);
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&held_), kGenerous));
  }
  void Open() {
    absl::MutexLock lock(&mu_);
    open_ = true;
  }

 private:
  absl::Mutex mu_;
  bool open_ ABSL_GUARDED_BY(mu_) = false;
  bool held_ ABSL_GUARDED_BY(mu_) = false;
};

// Counts what it hears. Its test reads it on other threads than the engine's.
class CountingSink final : public RequestSink {
 public:
  bool Ready() const override { return ready_; }
  void OnDelta(Delta delta) override {
    absl::MutexLock lock(&mu_);
    EXPECT_EQ(ends_, 0) << "output after the end";
    tokens_ += static_cast<int64_t>(delta.tokens.size());
  }
  void OnFinished(Finished finished) override {
    if (on_finished) on_finished();
    absl::MutexLock lock(&mu_);
    EXPECT_EQ(++ends_, 1) << "ended twice";
    finished_ = std::move(finished);
  }

  void set_ready(bool ready) { ready_ = ready; }
  int64_t tokens() const {
    absl::MutexLock lock(&mu_);
    return tokens_;
  }
  int ends() const {
    absl::MutexLock lock(&mu_);
    return ends_;
  }
  Finished finished() const {
    absl::MutexLock lock(&mu_);
    return finished_;
  }
  void AwaitEnd() const {
    absl::MutexLock lock(&mu_);
    auto ended = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return ends_ > 0; };
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&ended), kGenerous));
  }
  void AwaitTokens(int64_t tokens) const {
    absl::MutexLock lock(&mu_);
    auto has = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return tokens_ >= tokens; };
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&has), kGenerous));
  }

  std::function<void()> on_finished;  // set before the request is submitted

 private:
  std::atomic<bool> ready_{true};
  mutable absl::Mutex mu_;
  int64_t tokens_ ABSL_GUARDED_BY(mu_) = 0;
  int ends_ ABSL_GUARDED_BY(mu_) = 0;
  Finished finished_ ABSL_GUARDED_BY(mu_);
};

// An engine thread over a fake executor.
class EngineThreadTest : public testing::Test {
 protected:
  ~EngineThreadTest() override {
    gate_.Open();
    thread_.reset();
    EXPECT_EQ(script_->open_sequences, 0);
    EXPECT_EQ(script_->used_bytes, 0);
  }

  void Start(QueueLimits limits = {}, EngineOptions options = {},
             std::function<void()> on_start = nullptr, CoreShare cores = {},
             absl::Duration rest = absl::Seconds(10)) {
    options.kv_capacity_bytes = admission_.limits().kv_capacity_bytes;
    thread_ = std::make_unique<EngineThread>(
        std::make_unique<Engine>(options,
                                 std::make_unique<FakeExecutor>(script_, kFakeBytesPerToken),
                                 *tokenizer_, observer_),
        limits, std::move(on_start), cores, rest);
  }
  // The engine's thread will stop in its next forward.
  void HoldForwards() {
    script_->on_forward = [this](absl::Span<const WorkItem>) {
      gate_.Pass();
      return absl::OkStatus();
    };
  }

  Request Ask(const std::string& id, int64_t prompt_tokens, int64_t max_output,
              absl::Time deadline = absl::InfiniteFuture()) const {
    RequestOptions options{.id = id,
                           .prompt = std::vector<int32_t>(prompt_tokens, 0),
                           .arrival = SteadyNow(),
                           .deadline = deadline};
    options.stop.max_output_tokens = max_output;
    return std::get<Request>(admission_.Resolve(std::move(options)));
  }
  SubmitError Submit(const std::string& id, int64_t prompt_tokens, int64_t max_output,
                     std::shared_ptr<CountingSink> sink) {
    return thread_->Submit(Ask(id, prompt_tokens, max_output), std::move(sink)).error;
  }
  // Of a request that is accepted.
  std::shared_ptr<CountingSink> Submit(const std::string& id, int64_t prompt_tokens,
                                       int64_t max_output) {
    auto sink = std::make_shared<CountingSink>();
    EXPECT_EQ(Submit(id, prompt_tokens, max_output, sink), SubmitError::kNone);
    return sink;
  }

  const Admission admission_{FakeManifest(), EveryKindOfPolicy(),
                             AdmissionLimits{.kv_capacity_bytes = 1 << 20}};
  const std::unique_ptr<Tokenizer> tokenizer_ = *Tokenizer::FromJson(FakeTokenizerJson());
  const std::shared_ptr<FakeScript> script_ = std::make_shared<FakeScript>();
  EngineObserver observer_;
  Gate gate_;
  std::unique_ptr<EngineThread> thread_;
};

TEST_F(EngineThreadTest, RequestsRunToTheirEnd) {
  Start();
  const auto a = Submit("a", 5, 3);
  const auto b = Submit("b", 10, 20);
  a->AwaitEnd();
  b->AwaitEnd();
  EXPECT_EQ(a->tokens(), 3);
  EXPECT_EQ(b->tokens(), 20);
  EXPECT_EQ(b->finished().reason, FinishReason::kLength);
}

TEST_F(EngineThreadTest, StartsBeforeAllElseAndOnTheEnginesThread) {
  std::thread::id started, ended;
  Start({}, {}, [&] { started = std::this_thread::get_id(); });
  auto sink = std::make_shared<CountingSink>();
  sink->on_finished = [&] { ended = std::this_thread::get_id(); };
  Submit("a", 5, 1, sink);
  sink->AwaitEnd();
  EXPECT_EQ(started, ended);
  EXPECT_NE(started, std::this_thread::get_id());
}

// Once after each time it has worked: what it has freed is given back.
TEST_F(EngineThreadTest, RunsWhenIdleOnceItRests) {
  static std::atomic<int> times;
  times = 0;
  WhenIdle::Set([] { ++times; });
  Start({}, {}, nullptr, {}, absl::Milliseconds(5));
  auto await = [](int count) {
    while (times < count) absl::SleepFor(absl::Milliseconds(1));
    absl::SleepFor(absl::Milliseconds(30));
    EXPECT_EQ(times, count);
  };
  await(0);
  Submit("a", 5, 3)->AwaitEnd();
  await(1);
  Submit("b", 5, 3)->AwaitEnd();
  await(2);
  HoldForwards();
  const auto held = Submit("c", 5, 3);
  gate_.AwaitHeld();
  await(2);
  gate_.Open();
  held->AwaitEnd();
  await(3);
  WhenIdle::Set(nullptr);
}

// The queue.

TEST_F(EngineThreadTest, QueueIsBoundedInRequests) {
  HoldForwards();
  Start({.max_requests = 2}, {.max_running_requests = 1});
  auto submit = [this](const std::string& id) {
    return thread_->Submit(Ask(id, 5, 2), std::make_shared<CountingSink>());
  };
  EXPECT_EQ(submit("a").forecast.position, 0);
  gate_.AwaitHeld();
  // Until its step is over, `a` counts as waiting.
  EXPECT_EQ(submit("b").forecast.position, 1);
  const SubmitResult full = submit("c");
  EXPECT_EQ(full.error, SubmitError::kQueueFull);
  EXPECT_EQ(full.waiting, 2);
  EXPECT_EQ(full.retry_after, absl::Seconds(1)) << "nothing was measured";
  gate_.Open();
  thread_->Drain(absl::InfiniteFuture());
}

TEST_F(EngineThreadTest, ATenantHasHisShareOfAQueueThatOthersFill) {
  HoldForwards();
  Start({.max_requests = 4, .max_tokens = 400}, {.max_running_requests = 1});
  int64_t next = 0;
  auto submit = [&](const std::string& tenant, int64_t prompt = 5) {
    Request request = Ask(absl::StrCat(next++), prompt, 2);
    request.scheduling = {.tenant = tenant};
    return thread_->Submit(std::move(request), std::make_shared<CountingSink>()).error;
  };
  EXPECT_EQ(submit("a"), SubmitError::kNone);
  gate_.AwaitHeld();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(submit("a"), SubmitError::kNone);
  EXPECT_EQ(submit("a"), SubmitError::kQueueFull);
  EXPECT_EQ(submit("b", 300), SubmitError::kQueueFull) << "half of the tokens are his";
  EXPECT_EQ(submit("b"), SubmitError::kNone);
  EXPECT_EQ(submit("b"), SubmitError::kNone);
  EXPECT_EQ(submit("b"), SubmitError::kQueueFull);
  EXPECT_EQ(submit("c"), SubmitError::kNone);
  EXPECT_EQ(submit("c"), SubmitError::kQueueFull) << "a third of four is one";
  EXPECT_EQ(submit("d"), SubmitError::kNone);
  EXPECT_EQ(submit("e"), SubmitError::kQueueFull) << "there is no place in five parts of four";
  gate_.Open();
  thread_->Drain(absl::InfiniteFuture());
}

TEST_F(EngineThreadTest, PositionIsByPriorityAndTenant) {
  HoldForwards();
  Start({}, {.queue = {.quantum_tokens = 7}, .max_running_requests = 1});
  int64_t next = 0;
  auto position = [&](Priority priority, const std::string& tenant) {
    Request request = Ask(absl::StrCat(next++), 5, 2);
    request.scheduling = {.priority = priority, .tenant = tenant};
    return thread_->Submit(std::move(request), std::make_shared<CountingSink>()).forecast.position;
  };
  EXPECT_EQ(position(Priority::kHigh, "a"), 0);
  gate_.AwaitHeld();
  // Until its step is over, the first counts as waiting.
  EXPECT_EQ(position(Priority::kNormal, "a"), 1);
  EXPECT_EQ(position(Priority::kNormal, "a"), 2);
  EXPECT_EQ(position(Priority::kNormal, "b"), 2);  // behind the high one, and one turn of a's
  EXPECT_EQ(position(Priority::kHigh, "b"), 1);
  EXPECT_EQ(position(Priority::kLow, "a"), 5);
  gate_.Open();
  thread_->Drain(absl::InfiniteFuture());
}

TEST_F(EngineThreadTest, DeadlineThatCannotBeMetIsRefusedOnceThePaceIsKnown) {
  Start();
  const auto before = std::make_shared<CountingSink>();
  auto hopeless = [&](const std::shared_ptr<CountingSink>& sink) {
    Request request = Ask("hopeless", 5, 3000, absl::Now());
    request.ignore_end = true;
    return thread_->Submit(std::move(request), sink);
  };
  EXPECT_EQ(hopeless(before).error, SubmitError::kNone);
  before->AwaitEnd();
  EXPECT_EQ(before->finished().reason, FinishReason::kDeadline);
  Submit("measured", 5, 40)->AwaitEnd();
  SubmitResult refused;
  do {
    refused = hopeless(std::make_shared<CountingSink>());
  } while (refused.error != SubmitError::kDeadlineInfeasible);
  EXPECT_GT(refused.forecast.least_run, absl::ZeroDuration());
  EXPECT_EQ(refused.retry_after, std::nullopt) << "no wait makes it shorter";
  // It arrived with time enough, which passed before it came here (its prompt was encoded).
  Request held_up = Ask("held up", 5, 3000, SteadyNow());
  held_up.ignore_end = true;
  held_up.arrival = SteadyNow() - absl::Hours(1);
  refused = thread_->Submit(std::move(held_up), std::make_shared<CountingSink>());
  ASSERT_EQ(refused.error, SubmitError::kDeadlineInfeasible);
  ASSERT_TRUE(refused.retry_after.has_value());
  EXPECT_GT(*refused.retry_after, absl::ZeroDuration());
  EXPECT_EQ(thread_->Submit(Ask("endless", 5, 3000), std::make_shared<CountingSink>()).error,
            SubmitError::kNone);
}

TEST_F(EngineThreadTest, WhatIsDroppedFromTheQueueIsToldWhenToTryAgain) {
  script_->next = [](int32_t) { return 5; };  // no ends
  script_->on_forward = [](absl::Span<const WorkItem>) {
    absl::SleepFor(absl::Milliseconds(2));
    return absl::OkStatus();
  };
  Start({}, {.max_running_requests = 1});
  Submit("measured", 5, 40)->AwaitEnd();
  Submit("running", 5, 2000);  // it may end at any time, for all that is known
  const auto dropped = std::make_shared<CountingSink>();
  Request request = Ask("waiting", 5, 50, absl::Now() + absl::Milliseconds(500));
  request.ignore_end = true;
  ASSERT_EQ(thread_->Submit(std::move(request), dropped).error, SubmitError::kNone);
  dropped->AwaitEnd();
  EXPECT_EQ(ReasonOf(dropped->finished().status), kDeadlineInfeasible);
  const std::optional<absl::Duration> after = RetryAfterOf(dropped->finished().status);
  ASSERT_TRUE(after.has_value());
  EXPECT_GT(*after, absl::ZeroDuration());
}

TEST_F(EngineThreadTest, AQuestionThatFailsKeepsNoRequestFromBeingHeard) {
  HoldForwards();
  Start();
  const auto first = Submit("first", 5, 2);
  gate_.AwaitHeld();
  thread_->Describe([](const std::vector<RequestFacts>&) { throw std::bad_alloc(); });
  const auto second = Submit("second", 5, 2);  // heard of in the same breath
  gate_.Open();
  first->AwaitEnd();
  second->AwaitEnd();
  EXPECT_EQ(second->finished().reason, FinishReason::kLength);
}

TEST_F(EngineThreadTest, ForecastsCountTheTurnsOfOtherEngines) {
  CoreBudget cores(1);
  script_->next = [](int32_t) { return 5; };
  Start({}, {.max_running_requests = 1}, nullptr, {.budget = &cores});
  std::atomic<bool> busy = true;
  const auto take_turns = [&] {
    while (busy) {
      const CoreBudget::Lease turn = cores.Take(1);
      absl::SleepFor(absl::Milliseconds(5));
    }
  };
  std::thread others[] = {std::thread(take_turns), std::thread(take_turns)};
  while (cores.waiting() == 0) std::this_thread::yield();  // from now on one always waits
  Submit("measured", 5, 100)->AwaitEnd();
  Submit("running", 5, 300);  // in 1.5 s or more; by itself it would take a millisecond
  const SubmitResult next = thread_->Submit(Ask("next", 5, 1), std::make_shared<CountingSink>());
  busy = false;
  for (std::thread& other : others) other.join();
  thread_.reset();  // before its cores
  ASSERT_TRUE(next.forecast.wait.has_value());
  EXPECT_GE(*next.forecast.wait, absl::Milliseconds(200));
}

TEST_F(EngineThreadTest, ARequestAtIdleIsNotLiveAndGivesWayWithinAStep) {
  HoldForwards();
  Start();
  const auto idle = std::make_shared<CountingSink>();
  ASSERT_TRUE(thread_->SubmitIdle(Ask("", 5, 3000), idle));
  gate_.AwaitHeld();
  EXPECT_EQ(thread_->live(), 0);
  EXPECT_FALSE(thread_->SubmitIdle(Ask("", 5, 3), std::make_shared<CountingSink>())) << "one";
  EXPECT_FALSE(thread_->Cancel("", absl::CancelledError("")));
  const auto a = Submit("a", 5, 2);
  EXPECT_FALSE(thread_->SubmitIdle(Ask("", 5, 3), std::make_shared<CountingSink>())) << "a waits";
  gate_.Open();
  a->AwaitEnd();
  idle->AwaitEnd();
  EXPECT_EQ(idle->finished().status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(idle->tokens(), 1) << "of the step that was under way";
  EXPECT_EQ(a->tokens(), 2);
  const auto next = std::make_shared<CountingSink>();
  while (!thread_->SubmitIdle(Ask("", 5, 3), next)) std::this_thread::yield();
  next->AwaitEnd();
  EXPECT_EQ(next->tokens(), 3);
}

TEST_F(EngineThreadTest, DrainsAndEndsDoNotWaitForARequestAtIdle) {
  HoldForwards();
  Start();
  auto begin = [this] {
    auto idle = std::make_shared<CountingSink>();
    EXPECT_TRUE(thread_->SubmitIdle(Ask("", 5, 3000), idle));
    gate_.AwaitHeld();
    return idle;
  };
  const auto told = begin();
  thread_->EndIdle();
  gate_.Open();
  told->AwaitEnd();
  EXPECT_EQ(told->tokens(), 1);

  const auto drained = std::make_shared<CountingSink>();
  while (!thread_->SubmitIdle(Ask("", 5, 3000), drained)) std::this_thread::yield();
  thread_->Drain(absl::InfiniteFuture());
  EXPECT_EQ(drained->ends(), 1) << "before Drain returned";
  EXPECT_LT(drained->tokens(), 3000);
  EXPECT_FALSE(thread_->SubmitIdle(Ask("", 5, 3), std::make_shared<CountingSink>()));
  thread_->Resume();
  const auto ended = std::make_shared<CountingSink>();
  EXPECT_TRUE(thread_->SubmitIdle(Ask("", 5, 3000), ended));
  thread_.reset();
  EXPECT_EQ(ended->ends(), 1);
}

TEST_F(EngineThreadTest, ARequestAtIdleGivesWayToOtherEngines) {
  CoreBudget cores(1);
  HoldForwards();
  Start({}, {}, nullptr, {.budget = &cores});
  const auto idle = std::make_shared<CountingSink>();
  ASSERT_TRUE(thread_->SubmitIdle(Ask("", 5, 3000), idle));
  gate_.AwaitHeld();
  absl::Notification done;
  std::thread other([&] {
    const CoreBudget::Lease step = cores.Take(1);
    done.WaitForNotification();
  });
  while (cores.waiting() == 0) std::this_thread::yield();
  gate_.Open();
  idle->AwaitEnd();
  EXPECT_EQ(idle->tokens(), 1);
  EXPECT_EQ(idle->finished().status.code(), absl::StatusCode::kCancelled);
  done.Notify();
  other.join();
  thread_.reset();  // before its cores
}

TEST_F(EngineThreadTest, DeadlinesAreNotJudgedWhereThatIsNotWanted) {
  Start({}, {.refuse_infeasible_deadlines = false});
  Submit("measured", 5, 40)->AwaitEnd();
  for (int i = 0; i < 20; ++i) {
    const auto sink = std::make_shared<CountingSink>();
    EXPECT_EQ(thread_->Submit(Ask("hopeless", 5, 3000, absl::Now()), sink).error,
              SubmitError::kNone);
    sink->AwaitEnd();
  }
}

TEST_F(EngineThreadTest, QueueIsBoundedInTokens) {
  HoldForwards();
  Start({.max_tokens = 100}, {.max_running_requests = 1});
  const auto a = Submit("a", 20, 10);
  gate_.AwaitHeld();
  const auto b = Submit("b", 60, 9);
  const SubmitResult full = thread_->Submit(Ask("c", 1, 1), std::make_shared<CountingSink>());
  EXPECT_EQ(full.error, SubmitError::kQueueFull);
  EXPECT_EQ(full.full, SubmitResult::Full::kTokens);
  EXPECT_EQ(full.limit, 100);
  EXPECT_GT(full.waiting_tokens, 0);
  const auto d = std::make_shared<CountingSink>();
  gate_.Open();
  a->AwaitTokens(1);  // so the step that admitted it is over, or nearly
  while (Submit("d", 21, 10, d) == SubmitError::kQueueFull) std::this_thread::yield();
  thread_->Drain(absl::InfiniteFuture());
  EXPECT_EQ(d->tokens(), 10);
}

TEST_F(EngineThreadTest, RequestOverTheBoundInTokensWaitsAlone) {
  HoldForwards();
  Start({.max_tokens = 20}, {.max_running_requests = 1});
  const auto running = Submit("running", 20, 10);
  gate_.AwaitHeld();
  EXPECT_EQ(Submit("behind", 20, 10, std::make_shared<CountingSink>()), SubmitError::kQueueFull);
  gate_.Open();
  running->AwaitEnd();
  const auto alone = std::make_shared<CountingSink>();
  while (Submit("alone", 20, 10, alone) == SubmitError::kQueueFull) std::this_thread::yield();
  alone->AwaitEnd();
  EXPECT_EQ(alone->tokens(), 10);
}

TEST_F(EngineThreadTest, RefusedRequestHearsNothing) {
  HoldForwards();
  Start({.max_requests = 1});
  Submit("a", 5, 2);
  gate_.AwaitHeld();
  const auto refused = std::make_shared<CountingSink>();
  EXPECT_EQ(Submit("b", 5, 2, refused), SubmitError::kQueueFull);
  EXPECT_FALSE(thread_->Cancel("b", absl::CancelledError("")));
  gate_.Open();
  thread_->Drain(absl::InfiniteFuture());
  EXPECT_EQ(refused->ends(), 0);
  EXPECT_EQ(refused.use_count(), 1);
}

TEST_F(EngineThreadTest, FullQueueEmptiesAgain) {
  Start({.max_requests = 3}, {.max_running_requests = 2});
  std::vector<std::shared_ptr<CountingSink>> accepted;
  int refused = 0;
  for (int i = 0; i < 300; ++i) {
    auto sink = std::make_shared<CountingSink>();
    if (Submit(absl::StrCat(i), 5, 3, sink) == SubmitError::kNone) {
      accepted.push_back(sink);
    } else {
      ++refused;
      std::this_thread::yield();
    }
  }
  for (const auto& sink : accepted) sink->AwaitEnd();
  const auto after = Submit("after", 5, 3);
  after->AwaitEnd();
  EXPECT_EQ(after->tokens(), 3);
}

// Ids.

TEST_F(EngineThreadTest, LiveIdIsRefused) {
  HoldForwards();
  Start();
  const auto a = Submit("a", 5, 2);
  EXPECT_EQ(Submit("a", 5, 2, std::make_shared<CountingSink>()), SubmitError::kDuplicateId);
  gate_.AwaitHeld();
  EXPECT_EQ(Submit("a", 5, 2, std::make_shared<CountingSink>()), SubmitError::kDuplicateId);
  gate_.Open();
  a->AwaitEnd();
  EXPECT_EQ(a->tokens(), 2);
}

TEST_F(EngineThreadTest, IdIsFreeWhenTheEndIsHeard) {
  Start();
  for (int i = 0; i < 500; ++i) {
    const auto sink = Submit("a", 5, 2);
    if (i % 2 == 0) thread_->Cancel("a", absl::CancelledError(""));
    sink->AwaitEnd();
  }
}

// A cancel is for the request that was live when it was made.
TEST_F(EngineThreadTest, CancelThatComesTooLateSparesTheNextOfItsId) {
  Start();
  for (int i = 0; i < 500; ++i) {
    const auto first = Submit("a", 5, 1);
    thread_->Cancel("a", absl::CancelledError(""));  // perhaps after its end
    first->AwaitEnd();
    const auto second = Submit("a", 5, 1);
    second->AwaitEnd();
    EXPECT_EQ(second->finished().reason, FinishReason::kLength);
  }
}

// A stream that is told late of its client's leaving knows only its request's id.
TEST_F(EngineThreadTest, CancelOfASinkSparesTheNextOfItsId) {
  HoldForwards();
  const auto first = std::make_shared<CountingSink>();
  Start();
  EXPECT_FALSE(thread_->CancelOf(*first, "a", absl::CancelledError("")));
  const auto second = Submit("a", 5, 2);
  gate_.AwaitHeld();
  EXPECT_FALSE(thread_->CancelOf(*first, "a", absl::CancelledError("")));
  EXPECT_FALSE(thread_->CancelOf(*second, "b", absl::CancelledError("")));
  gate_.Open();
  second->AwaitEnd();
  EXPECT_EQ(second->finished().reason, FinishReason::kLength);

  const auto third = std::make_shared<CountingSink>();
  third->set_ready(false);  // it cannot end by itself
  Submit("a", 5, 2, third);
  EXPECT_TRUE(thread_->CancelOf(*third, "a", absl::CancelledError("")));
  third->AwaitEnd();
  EXPECT_EQ(third->finished().reason, FinishReason::kCancelled);
}

// Cancelling.

TEST_F(EngineThreadTest, CancelEndsQueuedAndRunning) {
  HoldForwards();
  Start({}, {.max_running_requests = 1});
  const auto running = Submit("running", 5, 1000);
  gate_.AwaitHeld();
  const auto queued = Submit("queued", 5, 1000);
  for (const char* id : {"queued", "running"}) {
    EXPECT_TRUE(thread_->Cancel(id, absl::CancelledError("the client has gone")));
  }
  EXPECT_FALSE(thread_->Cancel("nobody", absl::CancelledError("")));
  gate_.Open();
  for (const auto& sink : {queued, running}) {
    sink->AwaitEnd();
    EXPECT_EQ(sink->finished().reason, FinishReason::kCancelled);
    EXPECT_EQ(sink->finished().status, absl::CancelledError("the client has gone"));
  }
  EXPECT_LE(running->tokens(), 2) << "within one step";
  EXPECT_FALSE(thread_->Cancel("running", absl::CancelledError("")));
}

TEST_F(EngineThreadTest, CancelledTwiceEndsOnce) {
  HoldForwards();
  Start();
  const auto a = Submit("a", 5, 1000);
  gate_.AwaitHeld();
  EXPECT_TRUE(thread_->Cancel("a", absl::CancelledError("first")));
  EXPECT_TRUE(thread_->Cancel("a", absl::CancelledError("second")));
  gate_.Open();
  a->AwaitEnd();
  EXPECT_EQ(a->finished().status, absl::CancelledError("first"));
}

// Waking.

TEST_F(EngineThreadTest, WakeLetsAPausedRequestGoOn) {
  Start();
  const auto sink = std::make_shared<CountingSink>();
  sink->set_ready(false);
  Submit("a", 5, 3, sink);
  for (int i = 0; i < 100; ++i) std::this_thread::yield();
  EXPECT_EQ(sink->tokens(), 0);
  sink->set_ready(true);
  thread_->Wake();
  sink->AwaitEnd();
  EXPECT_EQ(sink->tokens(), 3);
}

TEST_F(EngineThreadTest, WakeIsNotLostWhereverItComes) {
  Start();
  const auto sink = Submit("a", 5, 2000);
  while (sink->ends() == 0) {
    sink->set_ready(false);
    sink->set_ready(true);
    thread_->Wake();
  }
  EXPECT_EQ(sink->tokens(), 63) << "from 0 to the model's end";
}

TEST_F(EngineThreadTest, DeadlinePassesWithoutAnyMessage) {
  Start();
  const auto sink = std::make_shared<CountingSink>();
  sink->set_ready(false);  // nothing can run: the thread sleeps
  EXPECT_EQ(thread_->Submit(Ask("a", 5, 3, absl::Now() + absl::Milliseconds(20)), sink).error,
            SubmitError::kNone);
  sink->AwaitEnd();
  EXPECT_EQ(sink->finished().reason, FinishReason::kDeadline);
}

// What no one request can be blamed for ends those that are live, and no thread.
TEST_F(EngineThreadTest, WhatAStepThrowsEndsItsRequestsAndTheThreadLives) {
  std::atomic<bool> throws = true;
  script_->on_forward = [&](absl::Span<const WorkItem>) -> absl::Status {
    if (throws.exchange(false)) throw std::runtime_error("out of order");
    return absl::OkStatus();
  };
  Start();
  const auto a = Submit("a", 5, 3);
  a->AwaitEnd();
  EXPECT_EQ(a->finished().reason, FinishReason::kError);
  EXPECT_EQ(a->finished().status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(a->finished().status.message(), "the engine failed: out of order");
  const auto b = Submit("b", 5, 3);
  b->AwaitEnd();
  EXPECT_EQ(b->finished().reason, FinishReason::kLength);
  EXPECT_EQ(script_->open_sequences, 0);
}

// Otherwise the next would wait for a message that need not come.
TEST_F(EngineThreadTest, FailedOpenDoesNotLeaveTheQueueBehind) {
  script_->on_open = [](const Request& request) {
    return request.id == "last" ? absl::OkStatus() : absl::InternalError("boom");
  };
  HoldForwards();
  Start({}, {.max_running_requests = 1});
  for (const char* id : {"a", "b", "c"}) Submit(id, 5, 1);
  const auto last = Submit("last", 5, 1);
  gate_.Open();
  last->AwaitEnd();
  EXPECT_EQ(last->finished().reason, FinishReason::kLength);
}

// The end.

TEST_F(EngineThreadTest, DrainLetsLiveRequestsEnd) {
  HoldForwards();
  Start({}, {.max_running_requests = 1});
  const auto a = Submit("a", 5, 10);
  const auto b = Submit("b", 5, 10);
  gate_.AwaitHeld();
  thread_->StartDraining();
  EXPECT_EQ(Submit("c", 5, 1, std::make_shared<CountingSink>()), SubmitError::kDraining);
  gate_.Open();
  thread_->Drain(absl::InfiniteFuture());
  for (const auto& sink : {a, b}) {
    EXPECT_EQ(sink->ends(), 1);
    EXPECT_EQ(sink->finished().reason, FinishReason::kLength);
  }
}

TEST_F(EngineThreadTest, DrainReturnsWhenTheLastSinkHasHeard) {
  for (int i = 0; i < 50; ++i) {
    Start();
    const auto sink = std::make_shared<CountingSink>();
    sink->on_finished = [] {
      for (int y = 0; y < 200; ++y) std::this_thread::yield();
    };
    Submit("a", 5, 3, sink);
    thread_->Drain(absl::InfiniteFuture());
    ASSERT_EQ(sink->ends(), 1);
  }
}

TEST_F(EngineThreadTest, DrainPastItsDeadlineCancelsTheRest) {
  Start({}, {.max_running_requests = 1});
  const auto paused = std::make_shared<CountingSink>();
  paused->set_ready(false);
  Submit("paused", 5, 10, paused);
  const auto queued = Submit("queued", 5, 10);
  thread_->Drain(absl::Now() + absl::Milliseconds(5));
  for (const auto& sink : {paused, queued}) {
    EXPECT_EQ(sink->ends(), 1);
    EXPECT_EQ(sink->finished().status.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(ReasonOf(sink->finished().status), kDraining);
  }
}

TEST_F(EngineThreadTest, DrainOfNothingReturnsAtOnce) {
  Start();
  thread_->Drain(absl::InfiniteFuture());
  thread_->Drain(absl::InfinitePast());
  EXPECT_EQ(Submit("a", 5, 1, std::make_shared<CountingSink>()), SubmitError::kDraining);
}

TEST_F(EngineThreadTest, DestructorEndsWhatIsLive) {
  Start({}, {.max_running_requests = 1});
  const auto running = std::make_shared<CountingSink>();
  running->set_ready(false);
  Submit("running", 5, 10, running);
  const auto queued = Submit("queued", 5, 10);
  const auto cancelled = Submit("cancelled", 5, 10);
  thread_->Cancel("cancelled", absl::CancelledError("first"));
  thread_.reset();
  for (const auto& sink : {running, queued, cancelled}) {
    EXPECT_EQ(sink->ends(), 1);
    EXPECT_EQ(sink->finished().reason, FinishReason::kCancelled);
  }
  EXPECT_EQ(cancelled->finished().status, absl::CancelledError("first"));
}

TEST_F(EngineThreadTest, DestructorEndsWhatCameDuringTheLastStep) {
  HoldForwards();
  Start();
  const auto running = Submit("running", 5, 10);
  gate_.AwaitHeld();
  const auto late = Submit("late", 5, 10);
  EngineThread& thread = *thread_;
  std::thread destroyer([this] { thread_.reset(); });
  // The destructor has begun, and waits for the step.
  auto refused = std::make_shared<CountingSink>();
  while (thread.Submit(Ask("running", 5, 10), refused).error != SubmitError::kDraining) {
    std::this_thread::yield();
  }
  gate_.Open();
  destroyer.join();
  EXPECT_EQ(running->ends(), 1);
  EXPECT_EQ(late->ends(), 1);
  EXPECT_EQ(late->tokens(), 0);
}

TEST_F(EngineThreadTest, DestructorOfAnIdleThreadReturns) {
  for (int i = 0; i < 100; ++i) {
    Start();
    thread_.reset();
  }
}

// Many threads at once.

class EngineThreadLaws : public EngineThreadTest, public testing::WithParamInterface<int> {
 protected:
  static constexpr int kThreads = 4, kAccepted = 100;  // by each

  // What one thread has submitted.
  struct Submissions {
    std::vector<std::shared_ptr<CountingSink>> accepted, refused;
    std::map<SubmitError, int> errors;
  };

  // Random calls, as of many RPCs, until enough are accepted or the thread drains. Ids collide
  // within and between threads; some clients stop reading, for a while or for good.
  Submissions Call(int seed) {
    std::mt19937 random(seed);
    auto draw = [&](int least, int most) {
      return std::uniform_int_distribution<int>(least, most)(random);
    };
    Submissions submissions;
    while (submissions.accepted.size() < kAccepted &&
           submissions.errors[SubmitError::kDraining] == 0) {
      const std::string id = absl::StrCat("r", draw(0, 40));
      switch (draw(0, 7)) {
        case 0:
          thread_->Cancel(id, absl::CancelledError("the client has gone"));
          break;
        case 1:
          for (const auto& sink : submissions.accepted) sink->set_ready(draw(0, 9) > 0);
          thread_->Wake();
          break;
        case 2:
          std::this_thread::yield();
          break;
        default: {
          auto sink = std::make_shared<CountingSink>();
          sink->set_ready(draw(0, 9) > 0);
          const absl::Time deadline = draw(0, 9) == 0 ? absl::Now() + absl::Milliseconds(draw(0, 5))
                                                      : absl::InfiniteFuture();
          const SubmitError error =
              thread_->Submit(Ask(id, draw(1, 50), draw(1, 30), deadline), sink).error;
          ++submissions.errors[error];
          if (error == SubmitError::kQueueFull) std::this_thread::yield();
          (error == SubmitError::kNone ? submissions.accepted : submissions.refused)
              .push_back(std::move(sink));
        }
      }
    }
    if (!leaves_paused_) {
      for (const auto& sink : submissions.accepted) sink->set_ready(true);
      thread_->Wake();
    }
    return submissions;
  }
  std::vector<Submissions> CallFromManyThreads() {
    std::vector<Submissions> all(kThreads);
    std::vector<std::thread> callers;
    for (int t = 0; t < kThreads; ++t) {
      callers.emplace_back([&, t] { all[t] = Call(GetParam() * 100 + t); });
    }
    for (std::thread& caller : callers) caller.join();
    return all;
  }
  // Failures of all kinds, by the engine's thread.
  void FailNowAndThen() {
    auto one_in = [random = std::make_shared<std::mt19937>(GetParam())](int n) {
      return std::uniform_int_distribution<int>(1, n)(*random) == 1 ? absl::InternalError("boom")
                                                                    : absl::OkStatus();
    };
    script_->on_open = [=](const Request&) { return one_in(100); };
    script_->on_forward = [=](absl::Span<const WorkItem>) { return one_in(30); };
    script_->on_item = [=](const WorkItem&) { return one_in(500); };
    script_->on_settle = [=](const WorkItem&) { return one_in(500); };
  }
  static void CheckEnds(const std::vector<Submissions>& all) {
    for (const Submissions& submissions : all) {
      for (const auto& sink : submissions.accepted) ASSERT_EQ(sink->ends(), 1);
      for (const auto& sink : submissions.refused) {
        ASSERT_EQ(sink->ends(), 0);
        ASSERT_EQ(sink->tokens(), 0);
      }
    }
  }

  bool leaves_paused_ = false;
};

TEST_P(EngineThreadLaws, EveryAcceptedRequestEndsOnce) {
  FailNowAndThen();
  Start({.max_requests = 12, .max_tokens = 600},
        {.scheduler = {.max_step_tokens = 64, .prefill_chunk_tokens = 16},
         .max_running_requests = 6});
  const std::vector<Submissions> all = CallFromManyThreads();
  thread_->Drain(absl::InfiniteFuture());
  CheckEnds(all);
  for (const Submissions& submissions : all) EXPECT_EQ(submissions.accepted.size(), kAccepted);
}

TEST_P(EngineThreadLaws, DrainingAmongCallsEndsAll) {
  leaves_paused_ = true;
  Start({.max_requests = 1 << 20}, {.max_running_requests = 6});
  std::thread drainer([this] {
    for (int i = 0; i < 50 * GetParam(); ++i) std::this_thread::yield();
    thread_->Drain(absl::Now() + absl::Milliseconds(GetParam()));
  });
  const std::vector<Submissions> all = CallFromManyThreads();
  drainer.join();
  CheckEnds(all);
}

TEST_P(EngineThreadLaws, DestructorAfterCallsEndsAll) {
  leaves_paused_ = true;
  Start({.max_requests = 1 << 20}, {.max_running_requests = 6});
  const std::vector<Submissions> all = CallFromManyThreads();
  thread_.reset();
  CheckEnds(all);
}

INSTANTIATE_TEST_SUITE_P(Seeds, EngineThreadLaws, testing::Range(1, 7));

}  // namespace engine_thread_test
}  // namespace epikv
