#include "server/stream/outbox.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "runtime/admission/admission.h"
#include "runtime/base/reason.h"
#include "runtime/engine/engine.h"
#include "runtime/engine/engine_thread.h"
#include "runtime/text/tokenizer.h"
#include "server/base/errors.h"
#include "server/stream/courier.h"
#include "tests/fixtures/fake_executor.h"
#include "tests/fixtures/fake_model.h"

namespace epikv {
namespace outbox_test {

using ::testing::ElementsAre;
using ::testing::SizeIs;

constexpr absl::Duration kLong = absl::Seconds(60);  // never waited for in full

// A message as a test writes it down.
std::string Text(const OutboxMessage& message) {
  if (const auto* queued = std::get_if<Queued>(&message)) {
    return absl::StrCat("queued ", queued->position);
  }
  if (const auto* delta = std::get_if<Delta>(&message)) {
    return absl::StrCat("delta ", delta->text, "|", absl::StrJoin(delta->tokens, ","));
  }
  if (const auto* progress = std::get_if<PromptProgress>(&message)) {
    return absl::StrCat("progress ", progress->done);
  }
  if (const auto* prompt = std::get_if<PromptLogprobs>(&message)) {
    return absl::StrCat("prompt ", prompt->first);
  }
  if (const auto* trace = std::get_if<EvictionTrace>(&message)) {
    return absl::StrCat("trace ", trace->at_token);
  }
  return "finished";
}

Delta Word(const std::string& text, int32_t token) { return {.text = text, .tokens = {token}}; }

Delta Round(int64_t at_token) { return {.evictions = {{.at_token = at_token}}}; }

// A stream whose writes end when the test says so, or at once.
class FakeWriter final : public StreamWriter {
 public:
  explicit FakeWriter(bool at_once) : at_once_(at_once) {}

  void Send(OutboxMessage message) override {
    {
      absl::MutexLock lock(&mu_);
      EXPECT_FALSE(writing_ || ended_) << "two writes at a time, or one after the end";
      sent_.push_back(Text(message));
      writing_ = !at_once_;
    }
    if (at_once_) outbox->OnWritten(true);
  }
  void Abort() override {
    absl::MutexLock lock(&mu_);
    EXPECT_TRUE(writing_);
    aborted_ = true;
  }
  void End(const absl::Status& status) override {
    absl::MutexLock lock(&mu_);
    EXPECT_FALSE(writing_ || ended_);
    end_ = status;
    ended_ = true;
  }

  void CompleteWrite(bool ok = true) {
    {
      absl::MutexLock lock(&mu_);
      auto writing = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return writing_; };
      ASSERT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&writing), kLong));
      writing_ = false;
    }
    outbox->OnWritten(ok);
  }
  void CompleteIfWriting(bool ok) {
    {
      absl::MutexLock lock(&mu_);
      if (!std::exchange(writing_, false)) return;
    }
    outbox->OnWritten(ok);
  }
  // The first `count` messages, when they are there.
  std::vector<std::string> AwaitSent(size_t count) {
    absl::MutexLock lock(&mu_);
    auto there = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return sent_.size() >= count; };
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&there), kLong));
    return sent_;
  }
  absl::Status AwaitEnd() {
    absl::MutexLock lock(&mu_);
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&ended_), kLong));
    return end_;
  }
  bool ended() {
    absl::MutexLock lock(&mu_);
    return ended_;
  }
  bool aborted() {
    absl::MutexLock lock(&mu_);
    return aborted_;
  }

  std::shared_ptr<Outbox> outbox;

 private:
  const bool at_once_;
  absl::Mutex mu_;
  std::vector<std::string> sent_ ABSL_GUARDED_BY(mu_);
  absl::Status end_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool aborted_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
};

// An outbox between a test that plays the engine and a FakeWriter. The clock stands still.
class OutboxTest : public ::testing::Test {
 protected:
  void Make(OutboxLimits limits, bool at_once = false) {
    writer_ = std::make_unique<FakeWriter>(at_once);
    // The hooks look at the outbox: with its mutex held they would never return.
    OutboxHooks hooks{.wake_engine = [this] { wakes_ += outbox_->Ready() ? 1 : 0; },
                      .cancel_request =
                          [this](const RequestSink&, absl::Status status) {
                            outbox_->Ready();
                            cancels_.push_back(std::move(status));
                          },
                      .was_full = [this](absl::Duration full) { full_ = full; }};
    const DeltaOptions deltas{.token_ids = true, .coalesce = coalesce_};
    outbox_ = std::make_shared<Outbox>(limits, std::move(hooks), deltas, *writer_, courier_,
                                       [this] { return Now(); });
    writer_->outbox = outbox_;
  }

  // The courier looks at the clock too.
  absl::Time Now() {
    absl::MutexLock lock(&clock_mu_);
    return now_;
  }
  void Advance(absl::Duration by) {
    absl::MutexLock lock(&clock_mu_);
    now_ += by;
  }

  absl::Duration coalesce_;
  absl::Mutex clock_mu_;
  absl::Time now_ ABSL_GUARDED_BY(clock_mu_) = absl::UnixEpoch();
  std::unique_ptr<FakeWriter> writer_;
  std::shared_ptr<Outbox> outbox_;
  std::atomic<int> wakes_{0};
  std::vector<absl::Status> cancels_;
  absl::Duration full_;
  Courier courier_{absl::Hours(1)};  // ends first: it may be calling the writer
};

TEST_F(OutboxTest, NothingIsSentBeforeItIsOpened) {
  Make({}, /*at_once=*/true);
  outbox_->OnDelta(Word("a", 1));
  outbox_->OnFinished({});
  EXPECT_TRUE(writer_->AwaitSent(0).empty());
  outbox_->Open({.position = 3});
  EXPECT_THAT(writer_->AwaitSent(3), ElementsAre("queued 3", "delta a|1", "finished"));
  EXPECT_TRUE(writer_->AwaitEnd().ok());
}

TEST_F(OutboxTest, WhatComesDuringAWriteSharesTheNextMessage) {
  Make({});
  outbox_->Open({});
  outbox_->OnDelta(Word("a", 1));
  outbox_->OnDelta(Word("b", 2));
  outbox_->OnDelta(Round(7));
  outbox_->OnDelta(Word("c", 3));
  outbox_->OnDelta(Word("d", 4));
  outbox_->OnFinished({});
  for (int i = 0; i < 5; ++i) writer_->CompleteWrite();
  EXPECT_THAT(writer_->AwaitSent(5),
              ElementsAre("queued 0", "delta ab|1,2", "trace 7", "delta cd|3,4", "finished"));
  EXPECT_TRUE(writer_->AwaitEnd().ok());
}

TEST_F(OutboxTest, PartsOfADeltaAreMessagesInOrder) {
  Make({}, /*at_once=*/true);
  outbox_->Open({});
  outbox_->OnDelta({.text = "a",
                    .tokens = {1},
                    .evictions = {{.at_token = 7}},
                    .progress = PromptProgress{.done = 5, .total = 5},
                    .prompt = {.first = 1, .tokens = {3}, .logprobs = {-1}}});
  outbox_->OnFinished({});
  EXPECT_THAT(writer_->AwaitSent(6), ElementsAre("queued 0", "progress 5", "prompt 1", "delta a|1",
                                                 "trace 7", "finished"));
}

TEST_F(OutboxTest, LikeliestTokensJoinAndCount) {
  Make({.max_bytes = 400});
  outbox_->Open({});
  const std::vector<TokenLogprob> top(20);
  outbox_->OnDelta({.top_logprobs = {top}});  // 168 bytes
  EXPECT_TRUE(outbox_->Ready());
  outbox_->OnDelta({.top_logprobs = {top, top}});
  EXPECT_FALSE(outbox_->Ready());
}

// Coalescing. The test plays the courier as well, so that what is not sent would have been.
class CoalescingTest : public OutboxTest {
 protected:
  void SetUp() override {
    coalesce_ = kLong;
    Make({.max_bytes = 1000}, /*at_once=*/true);
    outbox_->Open({});
    outbox_->OnDelta(Word("a", 1));
    outbox_->Deliver();
    ASSERT_THAT(writer_->AwaitSent(2), ElementsAre("queued 0", "delta a|1")) << "the first waited";
    Give(Word("b", 2));
    EXPECT_THAT(writer_->AwaitSent(0), SizeIs(2));
  }
  void Give(Delta delta) {
    outbox_->OnDelta(std::move(delta));
    outbox_->Deliver();
    AwaitCourier();
  }
  // It has delivered what was posted before: else it might do so when the clock has gone on.
  void AwaitCourier() {
    FakeWriter writer(/*at_once=*/true);
    writer.outbox = std::make_shared<Outbox>(
        OutboxLimits(),
        OutboxHooks{.wake_engine = [] {},
                    .cancel_request = [](const RequestSink&, absl::Status) {},
                    .was_full = [](absl::Duration) {}},
        DeltaOptions{.token_ids = true}, writer, courier_);
    writer.outbox->Open({});
    writer.outbox->OnDelta(Word("x", 1));
    writer.AwaitSent(2);
    writer.outbox->OnFinished({});
    EXPECT_TRUE(writer.AwaitEnd().ok());
  }
};

TEST_F(CoalescingTest, DeltasWaitForOthersAsLongAsAsked) {
  Advance(kLong / 2);
  Give(Word("c", 3));
  outbox_->DeliverLate();
  EXPECT_THAT(writer_->AwaitSent(0), SizeIs(2));
  Advance(kLong / 2);  // since b came
  outbox_->DeliverLate();
  EXPECT_THAT(writer_->AwaitSent(3), ElementsAre("queued 0", "delta a|1", "delta bc|2,3"));
  Give(Word("d", 4));
  EXPECT_THAT(writer_->AwaitSent(0), SizeIs(3)) << "the next one waits anew";
  outbox_->OnFinished({});
}

TEST_F(CoalescingTest, TheEndSendsWhatWaits) {
  outbox_->OnFinished({});
  EXPECT_THAT(writer_->AwaitSent(4), ElementsAre("queued 0", "delta a|1", "delta b|2", "finished"));
  EXPECT_TRUE(writer_->AwaitEnd().ok());
}

TEST_F(CoalescingTest, AFailureSendsWhatWaits) {
  outbox_->OnFinished({.reason = FinishReason::kError, .status = absl::InternalError("boom")});
  EXPECT_EQ(writer_->AwaitEnd(), absl::InternalError("boom"));
  EXPECT_THAT(writer_->AwaitSent(0), ElementsAre("queued 0", "delta a|1", "delta b|2"));
}

TEST_F(CoalescingTest, WhatComesBetweenDeltasEndsTheWait) {
  Give(Round(7));
  EXPECT_THAT(writer_->AwaitSent(4), ElementsAre("queued 0", "delta a|1", "delta b|2", "trace 7"));
  outbox_->OnFinished({});
}

TEST_F(CoalescingTest, AFullOutboxDoesNotWait) {
  Give({.text = std::string(1000, 'x')});
  EXPECT_THAT(writer_->AwaitSent(3), SizeIs(3));
  outbox_->OnFinished({});
}

TEST_F(CoalescingTest, WhatWaitsDoesNotStallAndGoesWithItsClient) {
  Advance(kLong * 10);
  outbox_->CheckStall();
  EXPECT_TRUE(cancels_.empty());
  outbox_->OnClientGone(absl::CancelledError("gone"));
  outbox_->OnFinished({.reason = FinishReason::kCancelled, .status = absl::CancelledError("gone")});
  EXPECT_EQ(writer_->AwaitEnd(), absl::CancelledError("gone"));
  EXPECT_THAT(writer_->AwaitSent(0), SizeIs(2));
}

// By the clock: the courier comes back by itself, sooner for who asks later but waits less.
TEST(CoalescingCourierTest, ComesBackWhenADeltaIsDue) {
  Courier courier(absl::Hours(1));
  std::vector<std::unique_ptr<FakeWriter>> writers;
  for (absl::Duration coalesce : {absl::Minutes(9), absl::Milliseconds(2)}) {
    writers.push_back(std::make_unique<FakeWriter>(/*at_once=*/true));
    FakeWriter& writer = *writers.back();
    writer.outbox = std::make_shared<Outbox>(
        OutboxLimits(),
        OutboxHooks{.wake_engine = [] {},
                    .cancel_request = [](const RequestSink&, absl::Status) {},
                    .was_full = [](absl::Duration) {}},
        DeltaOptions{.token_ids = true, .coalesce = coalesce}, writer, courier);
    writer.outbox->Open({});
    writer.outbox->OnDelta(Word("a", 1));
    writer.AwaitSent(2);
    writer.outbox->OnDelta(Word("b", 2));
  }
  EXPECT_THAT(writers[1]->AwaitSent(3), ElementsAre("queued 0", "delta a|1", "delta b|2"));
  EXPECT_THAT(writers[0]->AwaitSent(0), SizeIs(2));
  for (auto& writer : writers) {
    writer->outbox->OnFinished({});
    EXPECT_TRUE(writer->AwaitEnd().ok());
  }
}

TEST_F(OutboxTest, EmptyDeltasAreNotSent) {
  Make({}, /*at_once=*/true);
  outbox_->Open({});
  outbox_->OnDelta({});
  outbox_->OnFinished({});
  EXPECT_THAT(writer_->AwaitSent(2), ElementsAre("queued 0", "finished"));
}

TEST_F(OutboxTest, FailureEndsTheStreamAfterWhatWasSaid) {
  Make({});
  outbox_->Open({});
  outbox_->OnDelta(Word("a", 1));
  outbox_->OnFinished({.reason = FinishReason::kError, .status = absl::InternalError("boom")});
  writer_->CompleteWrite();
  writer_->CompleteWrite();
  EXPECT_EQ(writer_->AwaitEnd(), absl::InternalError("boom"));
  EXPECT_THAT(writer_->AwaitSent(2), ElementsAre("queued 0", "delta a|1"));
}

TEST_F(OutboxTest, FullInBytesUntilHalfIsRead) {
  Make({.max_bytes = 400});
  outbox_->Open({});
  outbox_->OnDelta({.text = std::string(100, 'a')});
  EXPECT_TRUE(outbox_->Ready());
  outbox_->OnDelta({.text = std::string(300, 'b')});
  EXPECT_FALSE(outbox_->Ready());
  writer_->CompleteWrite();  // of `queued`; the 400 bytes are under way
  writer_->AwaitSent(2);
  EXPECT_FALSE(outbox_->Ready());
  EXPECT_EQ(wakes_, 0);
  Advance(absl::Seconds(5));
  writer_->CompleteWrite();
  EXPECT_TRUE(outbox_->Ready());
  EXPECT_EQ(wakes_, 1);
  EXPECT_EQ(full_, absl::Seconds(5));
}

TEST_F(OutboxTest, FullInMessagesWhereTheyCannotJoin) {
  Make({.max_messages = 4});
  outbox_->Open({});  // under way, and counts
  for (int i = 0; i < 2; ++i) outbox_->OnDelta(Round(i));
  EXPECT_TRUE(outbox_->Ready());
  outbox_->OnDelta(Round(2));
  EXPECT_FALSE(outbox_->Ready());
}

TEST_F(OutboxTest, FailedWriteCancelsTheRequestOnce) {
  Make({});
  outbox_->Open({});
  outbox_->OnDelta(Word("a", 1));
  writer_->CompleteWrite(/*ok=*/false);
  EXPECT_THAT(cancels_, ElementsAre(absl::CancelledError("the client has gone")));
  outbox_->OnDelta(Word("b", 2));  // goes nowhere
  outbox_->OnFinished({.reason = FinishReason::kCancelled, .status = absl::CancelledError("x")});
  EXPECT_EQ(writer_->AwaitEnd(), absl::CancelledError("x"));
  EXPECT_THAT(writer_->AwaitSent(1), ElementsAre("queued 0"));
  EXPECT_EQ(cancels_.size(), 1u);
}

TEST_F(OutboxTest, ClientThatLeavesAfterTheEndCancelsNothing) {
  Make({});
  outbox_->Open({});
  outbox_->OnFinished({});
  outbox_->OnClientGone(absl::CancelledError("gone"));
  writer_->CompleteWrite();
  EXPECT_TRUE(writer_->AwaitEnd().ok());
  EXPECT_TRUE(cancels_.empty());
}

TEST_F(OutboxTest, ReaderThatStallsLosesItsRequestAndThenItsStream) {
  Make({.stall = absl::Seconds(10)});
  outbox_->Open({});
  outbox_->OnDelta(Word("a", 1));
  Advance(absl::Seconds(9));
  outbox_->CheckStall();
  EXPECT_TRUE(cancels_.empty());
  Advance(absl::Seconds(1));
  outbox_->CheckStall();
  outbox_->CheckStall();
  ASSERT_EQ(cancels_.size(), 1u);
  EXPECT_EQ(cancels_[0].code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(cancels_[0]), kSlowReader);
  outbox_->OnFinished({.reason = FinishReason::kCancelled, .status = cancels_[0]});
  EXPECT_FALSE(writer_->aborted());
  Advance(absl::Seconds(10));
  outbox_->CheckStall();
  EXPECT_TRUE(writer_->aborted());
  writer_->CompleteWrite(/*ok=*/false);
  EXPECT_EQ(ReasonOf(writer_->AwaitEnd()), kSlowReader);
}

TEST_F(OutboxTest, ReaderThatComesBackAfterAStallIsToldWhy) {
  Make({.stall = absl::Seconds(10)});
  outbox_->Open({});
  outbox_->OnDelta(Word("a", 1));
  outbox_->OnFinished({});  // all was generated in time, and cannot be delivered
  Advance(absl::Seconds(11));
  outbox_->CheckStall();
  EXPECT_TRUE(cancels_.empty());
  writer_->CompleteWrite();
  EXPECT_EQ(ReasonOf(writer_->AwaitEnd()), kSlowReader);
  EXPECT_THAT(writer_->AwaitSent(1), ElementsAre("queued 0"));
}

TEST_F(OutboxTest, ReaderWithNothingToReadDoesNotStall) {
  Make({.stall = absl::Seconds(10)}, /*at_once=*/true);
  outbox_->Open({});
  Advance(absl::Hours(5));
  outbox_->CheckStall();
  EXPECT_TRUE(cancels_.empty());
}

TEST_F(OutboxTest, CompletionsInsideSendDoNotRecurse) {
  Make({.max_messages = 1 << 20}, /*at_once=*/true);
  constexpr int kMany = 200'000;
  for (int i = 0; i < kMany; ++i) outbox_->OnDelta(Round(i));
  outbox_->Open({});
  EXPECT_EQ(writer_->AwaitSent(kMany + 1).size(), kMany + 1u);
}

// Threads race as they do in a daemon: an engine thread, the courier, completions from two threads,
// a patrol and clients that leave. ThreadSanitizer watches.
TEST(OutboxRaceTest, EveryStreamEndsExactlyOnce) {
  constexpr int kStreams = 64, kTokens = 200;
  struct Stream {
    FakeWriter writer{false};
    std::atomic<bool> cancelled{false};
  };
  std::vector<std::unique_ptr<Stream>> streams;
  Courier courier(absl::Milliseconds(1));  // ends first: it may be calling a writer
  for (int i = 0; i < kStreams; ++i) {
    Stream& stream = *streams.emplace_back(std::make_unique<Stream>());
    OutboxHooks hooks{
        .wake_engine = [] {},
        .cancel_request = [&stream](const RequestSink&, absl::Status) { stream.cancelled = true; },
        .was_full = [](absl::Duration) {}};
    // Some let their deltas wait, for about as long as a few tokens take.
    const DeltaOptions deltas{.token_ids = true, .coalesce = absl::Microseconds(100 * (i % 4))};
    stream.writer.outbox =
        std::make_shared<Outbox>(OutboxLimits{.max_messages = 8, .max_bytes = 1 << 20},
                                 std::move(hooks), deltas, stream.writer, courier);
  }
  std::thread engine([&] {
    for (int token = 0; token < kTokens; ++token) {
      for (auto& stream : streams) {
        if (stream->cancelled || !stream->writer.outbox->Ready()) continue;
        stream->writer.outbox->OnDelta(Word("t", token));
        if (token % 3 == 0) stream->writer.outbox->OnDelta(Round(token));
      }
    }
    for (auto& stream : streams) {
      stream->writer.outbox->OnFinished(
          {.status = stream->cancelled ? absl::CancelledError("") : absl::OkStatus()});
    }
  });
  for (auto& stream : streams) stream->writer.outbox->Open({});
  std::thread leaver([&] {
    for (size_t i = 0; i < streams.size(); i += 5) {
      streams[i]->writer.outbox->OnClientGone(absl::CancelledError("gone"));
    }
  });
  std::vector<std::thread> readers;
  for (size_t half = 0; half < 2; ++half) {
    readers.emplace_back([&, half] {
      for (size_t i = half; i < streams.size(); i += 2) {
        for (int writes = 0; !streams[i]->writer.ended(); ++writes) {
          streams[i]->writer.CompleteIfWriting(/*ok=*/i % 7 != 0 || writes < 3);
        }
      }
    });
  }
  engine.join();
  leaver.join();
  for (std::thread& reader : readers) reader.join();
  for (auto& stream : streams) EXPECT_TRUE(stream->writer.ended());
}

// A stream of a real engine: reads at its own pace, and leaves after so many messages.
class EngineStream final : public StreamWriter {
 public:
  EngineStream(EngineThread& engine, Courier& courier, std::string id, int leaves_after)
      : leaves_after_(leaves_after) {
    outbox_ = std::make_shared<Outbox>(
        OutboxLimits{.max_messages = 2, .max_bytes = 256},
        OutboxHooks{
            .wake_engine = [&engine] { engine.Wake(); },
            .cancel_request = [&engine, id](const RequestSink& sink,
                                            absl::Status s) { engine.CancelOf(sink, id, s); },
            .was_full = [](absl::Duration) {}},
        DeltaOptions{.token_ids = true}, *this, courier);
  }

  void Send(OutboxMessage) override {
    absl::MutexLock lock(&mu_);
    writing_ = true;
  }
  void Abort() override {}
  void End(const absl::Status&) override {
    absl::MutexLock lock(&mu_);
    ended_ = true;
  }
  // False: it has ended. Of one thread.
  bool Read() {
    {
      absl::MutexLock lock(&mu_);
      if (ended_) return false;
      if (!std::exchange(writing_, false)) return true;
    }
    if (++read_ == leaves_after_) outbox_->OnClientGone(absl::CancelledError("gone"));
    outbox_->OnWritten(/*ok=*/read_ < leaves_after_);
    return true;
  }
  const std::shared_ptr<Outbox>& outbox() const { return outbox_; }

 private:
  const int leaves_after_;
  std::shared_ptr<Outbox> outbox_;
  int read_ = 0;
  absl::Mutex mu_;
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
};

// Everything that threads touch, but gRPC: inbox, engine, outboxes and courier, with clients that
// submit, read, leave and are cancelled from threads of their own.
TEST(OutboxRaceTest, StreamsOfAnEngineLeaveItWhole) {
  constexpr int kClients = 4, kRequests = 30;
  const auto script = std::make_shared<FakeScript>();
  const auto tokenizer = *Tokenizer::FromJson(FakeTokenizerJson());
  const Admission admission(FakeManifest(), FakeCatalog(),
                            {.kv_capacity_bytes = 1000 * kFakeBytesPerToken});
  EngineObserver observer;
  std::vector<std::unique_ptr<EngineStream>> streams(kClients * kRequests);
  Courier courier(absl::Milliseconds(1));
  EngineThread engine(
      std::make_unique<Engine>(EngineOptions{.kv_capacity_bytes = 1000 * kFakeBytesPerToken},
                               std::make_unique<FakeExecutor>(script, kFakeBytesPerToken),
                               *tokenizer, observer),
      QueueLimits(), nullptr);
  std::vector<std::thread> clients;
  for (int client = 0; client < kClients; ++client) {
    clients.emplace_back([&, client] {
      for (int i = client; i < kClients * kRequests; i += kClients) {
        RequestOptions options{.id = absl::StrCat(i),
                               .prompt = std::vector<int32_t>(5 + i % 40, 1)};
        options.stop.max_output_tokens = 40;
        options.kv = {.policy = "window", .budget = int64_t{24}};
        auto stream = std::make_unique<EngineStream>(engine, courier, options.id, 1 + i % 30);
        const SubmitResult submitted = engine.Submit(
            std::get<Request>(admission.Resolve(std::move(options))), stream->outbox());
        ASSERT_EQ(submitted.error, SubmitError::kNone);
        stream->outbox()->Open({static_cast<int64_t>(submitted.forecast.position)});
        while (i % 11 != 0 && stream->Read()) {
        }
        // Nobody reads the others: CancelRequest ends them, and Drain their engine.
        if (i % 11 == 0) engine.Cancel(absl::StrCat(i), absl::CancelledError("by id"));
        streams[i] = std::move(stream);
      }
    });
  }
  for (std::thread& client : clients) client.join();
  engine.Drain(absl::Now());
  EXPECT_EQ(script->open_sequences, 0);
  EXPECT_EQ(script->used_bytes, 0);
  for (auto& stream : streams) {
    while (stream->Read()) {
    }
  }
}

}  // namespace outbox_test
}  // namespace epikv
