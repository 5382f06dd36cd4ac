#include "server/experiments/store/recorder.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/notification.h"
#include "runtime/base/steady_time.h"
#include "tests/fixtures/experiment_records.h"
#include "tests/fixtures/store_places.h"

namespace epikv {
namespace recorder_test {

using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Lt;
using ::testing::SizeIs;

const RecorderOptions kQuick = {.first_backoff = absl::Milliseconds(1),
                                .last_backoff = absl::Milliseconds(4)};
constexpr absl::Duration kGenerous = absl::Seconds(60);  // only a broken test waits so long

// Keeps what it is given, when and as the test says.
class FakeStore final : public Store {
 public:
  absl::StatusOr<WriteResult> Write(absl::Span<const v1::ExperimentRecord> records,
                                    Source source) override {
    absl::MutexLock lock(&mu_);
    ++calls_;
    mu_.Await(absl::Condition(&open_));
    if (!error_.ok()) return error_;
    if (records.size() > most_) return absl::UnavailableError("too slow");
    for (const v1::ExperimentRecord& record : records) {
      if (NameOf(record) == "poison") return absl::InvalidArgumentError("poison");
    }
    for (const v1::ExperimentRecord& record : records) {
      written_.push_back(absl::StrCat(NameOf(record), source == Source::kSpool ? "*" : ""));
      records_.push_back(record);
    }
    batches_.push_back(records.size());
    return WriteResult{.records = std::vector<Recorded>(records.size(), Recorded::kWritten),
                       .outcomes = {}};
  }
  absl::StatusOr<Definitions> Experiments() override { return absl::UnimplementedError(""); }
  absl::StatusOr<int64_t> Revision() override {
    absl::MutexLock lock(&mu_);
    if (!error_.ok()) return error_;
    return ++found_;
  }
  absl::StatusOr<v1::Experiment> Create(const v1::Experiment&) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<v1::Experiment> Replace(const v1::Experiment&, const std::string&) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<v1::Experiment> Change(const std::string&, Edit) override {
    return absl::UnimplementedError("");
  }
  absl::Status ReadRequests(const Reading&, OnRequest) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<int64_t> Forget(absl::Time) override { return absl::UnimplementedError(""); }

  static std::string NameOf(const v1::ExperimentRecord& record) {
    if (record.has_outcome()) return record.outcome().request_id();
    return record.has_began() ? record.began().id() : record.ended().id();
  }

  void FailWith(absl::Status error) {
    absl::MutexLock lock(&mu_);
    error_ = std::move(error);
  }
  // Records that it writes at once.
  void SetMost(size_t records) {
    absl::MutexLock lock(&mu_);
    most_ = records;
  }
  // Calls wait while it is closed.
  void SetOpen(bool open) {
    absl::MutexLock lock(&mu_);
    open_ = open;
  }
  void AwaitCalls(int calls) {
    absl::MutexLock lock(&mu_);
    auto enough = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return calls_ >= calls; };
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&enough), kGenerous));
  }
  // Until it was looked for, and found.
  void AwaitFound() {
    absl::MutexLock lock(&mu_);
    auto found = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return found_ > 0; };
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&found), kGenerous));
  }
  // Names in the order of writing; those of a spool with a star.
  std::vector<std::string> AwaitWritten(size_t records) {
    absl::MutexLock lock(&mu_);
    auto enough = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return written_.size() >= records; };
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&enough), kGenerous));
    return written_;
  }
  std::vector<size_t> batches() {
    absl::MutexLock lock(&mu_);
    return batches_;
  }
  std::vector<v1::ExperimentRecord> records() {
    absl::MutexLock lock(&mu_);
    return records_;
  }

 private:
  absl::Mutex mu_;
  int calls_ ABSL_GUARDED_BY(mu_) = 0;
  int found_ ABSL_GUARDED_BY(mu_) = 0;
  bool open_ ABSL_GUARDED_BY(mu_) = true;
  absl::Status error_ ABSL_GUARDED_BY(mu_);
  size_t most_ ABSL_GUARDED_BY(mu_) = std::numeric_limits<size_t>::max();
  std::vector<std::string> written_ ABSL_GUARDED_BY(mu_);
  std::vector<v1::ExperimentRecord> records_ ABSL_GUARDED_BY(mu_);
  std::vector<size_t> batches_ ABSL_GUARDED_BY(mu_);
};

class Counts final : public RecorderObserver {
 public:
  void OnWritten(int64_t records) override { Add("written", records); }
  void OnReplayed(int64_t records) override { Add("replayed", records); }
  void OnSpooled(int64_t records) override { Add("spooled", records); }
  void OnOrphaned(Recorded why) override { Add(absl::StrCat("orphaned ", int(why)), 1); }
  void OnDropped(int64_t records) override { Add("dropped", records); }
  void OnRefused(int64_t outcomes) override { Add("refused", outcomes); }
  void OnOutage(const absl::Status& why) override {
    Add("outages", 1);
    absl::MutexLock lock(&mu_);
    last_outage_ = why;
  }
  void OnOutageTime(absl::Duration more) override {
    EXPECT_GE(more, absl::ZeroDuration());
    Add("outage times", 1);
  }
  void OnSpool(int64_t bytes, SpoolDamage) override {
    absl::MutexLock lock(&mu_);
    counts_["spool bytes"] = bytes;
  }

  void Await(const std::string& name, int64_t count) {
    absl::MutexLock lock(&mu_);
    auto enough = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return counts_[name] >= count; };
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&enough), kGenerous)) << name;
  }
  // Progress may take any time, standing still may not.
  void AwaitEmptySpool() {
    absl::MutexLock lock(&mu_);
    for (int64_t left = -1; left != 0;) {
      left = counts_["spool bytes"];
      auto less = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return counts_["spool bytes"] < left || counts_["spool bytes"] == 0;
      };
      ASSERT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&less), kGenerous))
          << left << " bytes are left; " << last_outage_;
    }
  }
  int64_t operator[](const std::string& name) {
    absl::MutexLock lock(&mu_);
    return counts_[name];
  }

 private:
  void Add(const std::string& name, int64_t count) {
    absl::MutexLock lock(&mu_);
    counts_[name] += count;
  }
  absl::Mutex mu_;
  std::map<std::string, int64_t> counts_ ABSL_GUARDED_BY(mu_);
  absl::Status last_outage_ ABSL_GUARDED_BY(mu_);
};

// What callers were told, in order.
class Answers {
 public:
  Recorder::Done For(const std::string& name) {
    return [this, name](const absl::StatusOr<Recorded>& recorded) {
      absl::MutexLock lock(&mu_);
      answers_.push_back(absl::StrCat(name, " ", Text(recorded)));
    };
  }
  std::vector<std::string> Await(size_t count) {
    absl::MutexLock lock(&mu_);
    auto enough = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return answers_.size() >= count; };
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&enough), kGenerous));
    return answers_;
  }

 private:
  static std::string Text(const absl::StatusOr<Recorded>& recorded) {
    if (!recorded.ok()) return absl::StatusCodeToString(recorded.status().code());
    if (*recorded == Recorded::kWritten) return "written";
    return *recorded == Recorded::kSpooled ? "spooled" : "other";
  }
  absl::Mutex mu_;
  std::vector<std::string> answers_ ABSL_GUARDED_BY(mu_);
};

class RecorderTest : public ::testing::Test {
 protected:
  ~RecorderTest() override { store_.SetOpen(true); }
  void Start(const RecorderOptions& options = kQuick, const SpoolOptions& spool_options = {}) {
    recorder_ = nullptr;
    absl::StatusOr<std::unique_ptr<Spool>> spool =
        Spool::Open(folder_.File("spool"), spool_options);
    ASSERT_TRUE(spool.ok()) << spool.status();
    recorder_ = std::make_unique<Recorder>(store_, *std::move(spool), counts_, options);
  }
  void Fact(const std::string& name, double at = 1) {
    recorder_->Record(Record(Begun{.id = name, .at = at}));
  }
  void Outcome(const std::string& name, double at = 1) {
    recorder_->Record(Record(Seen{.client = name, .at = at}), answers_.For(name));
  }

  const absl::Status away_ = absl::UnavailableError("away");
  TemporaryFolder folder_;
  FakeStore store_;
  Counts counts_;
  Answers answers_;
  std::unique_ptr<Recorder> recorder_;
};

TEST_F(RecorderTest, AnswersOnceTheStoreHasIt) {
  Start();
  store_.SetOpen(false);
  Fact("r");
  Outcome("r");
  store_.AwaitCalls(1);
  EXPECT_THAT(answers_.Await(0), IsEmpty());
  store_.SetOpen(true);
  EXPECT_THAT(answers_.Await(1), ElementsAre("r written"));
  EXPECT_THAT(store_.AwaitWritten(2), ElementsAre("r", "r"));
}

TEST_F(RecorderTest, WhatIsQueuedIsWrittenAtOnce) {
  Start({.max_batch = 4});
  store_.SetOpen(false);
  Outcome("first");
  store_.AwaitCalls(1);
  for (int i = 0; i < 10; ++i) Outcome(absl::StrCat(i));
  store_.SetOpen(true);
  answers_.Await(11);
  EXPECT_THAT(store_.batches(), ElementsAre(1, 4, 4, 2));
}

TEST_F(RecorderTest, CallersNeverWaitAndTheQueueIsBounded) {
  Start({.max_queued_bytes = 2000});
  store_.SetOpen(false);
  Outcome("first");
  store_.AwaitCalls(1);
  for (int i = 0; i < 50; ++i) Fact(absl::StrCat(i));
  Outcome("one too many");
  EXPECT_THAT(answers_.Await(1), ElementsAre("one too many RESOURCE_EXHAUSTED"));
  EXPECT_GT(counts_["dropped"], 30);
  EXPECT_EQ(counts_["refused"], 1);
  store_.SetOpen(true);
  recorder_ = nullptr;
  EXPECT_EQ(counts_["written"] + counts_["dropped"], 51);
}

TEST_F(RecorderTest, AnOutageGoesToTheSpoolAndBackInOrder) {
  Start();
  Outcome("before");
  answers_.Await(1);
  store_.FailWith(away_);
  for (const char* name : {"1", "2", "3"}) {
    Fact(name);
    Outcome(name);
  }
  EXPECT_THAT(answers_.Await(4),
              ElementsAre("before written", "1 spooled", "2 spooled", "3 spooled"));
  counts_.Await("outage times", 3);  // it has been tried again
  EXPECT_GT(counts_["spool bytes"], 0);
  store_.FailWith(absl::OkStatus());
  EXPECT_THAT(store_.AwaitWritten(7), ElementsAre("before", "1*", "1*", "2*", "2*", "3*", "3*"));
  counts_.Await("replayed", 6);
  Outcome("after");
  EXPECT_THAT(answers_.Await(5), Contains("after written"));
  EXPECT_EQ(counts_["spooled"], 6);
  EXPECT_EQ(counts_["spool bytes"], 0);
  EXPECT_EQ(counts_["outages"], 1);
}

TEST_F(RecorderTest, AnOutageEndsThoughNothingIsLeftToBeWritten) {
  Start(kQuick, {.max_bytes = 0});
  store_.FailWith(away_);
  Outcome("1");
  EXPECT_THAT(answers_.Await(1), ElementsAre("1 RESOURCE_EXHAUSTED"));
  counts_.Await("outage times", 3);
  store_.FailWith(absl::OkStatus());
  store_.AwaitFound();
  Outcome("2");
  EXPECT_THAT(answers_.Await(2), Contains("2 written"));
  const int64_t times = counts_["outage times"];
  Outcome("3");
  answers_.Await(3);
  EXPECT_EQ(counts_["outage times"], times);
  EXPECT_EQ(counts_["outages"], 1);
}

TEST_F(RecorderTest, NewRecordsDoNotPassTheSpool) {
  Start({.max_batch = 1,
         .first_backoff = absl::Milliseconds(1),
         .last_backoff = absl::Milliseconds(1)});
  store_.FailWith(away_);
  for (int i = 0; i < 20; ++i) Outcome(absl::StrCat(i));
  answers_.Await(20);
  store_.FailWith(absl::OkStatus());
  for (int i = 20; i < 40; ++i) Outcome(absl::StrCat(i));
  const std::vector<std::string> written = store_.AwaitWritten(40);
  for (int i = 0; i < 40; ++i) {
    EXPECT_EQ(std::string(absl::StripSuffix(written[i], "*")), absl::StrCat(i));
  }
}

TEST_F(RecorderTest, TheSpoolEndsThoughRecordsNeverStopComing) {
  Start({.max_batch = 4,
         .first_backoff = absl::Milliseconds(1),
         .last_backoff = absl::Milliseconds(1)});
  store_.FailWith(away_);
  for (size_t i = 0; i < 100; ++i) Outcome(absl::StrCat(i));
  answers_.Await(100);
  store_.FailWith(absl::OkStatus());
  size_t outcomes = 100;
  for (; counts_["written"] == 0 && outcomes < 100'000; outcomes += 8) {
    for (int i = 0; i < 8; ++i) Outcome("more");
    answers_.Await(outcomes);  // so that there are always some to be written
  }
  EXPECT_THAT(outcomes, Lt(10'000u));
}

// A store that does only so much in its time.
TEST_F(RecorderTest, ASlowStoreIsAskedForLessAtOnce) {
  Start();
  store_.FailWith(away_);
  for (int i = 0; i < 100; ++i) Outcome(absl::StrCat(i));
  answers_.Await(100);
  store_.SetMost(3);
  store_.FailWith(absl::OkStatus());
  EXPECT_THAT(store_.AwaitWritten(100).back(), "99*");
}

TEST_F(RecorderTest, ALaterProcessFindsTheSpool) {
  Start();
  store_.FailWith(away_);
  Outcome("1");
  answers_.Await(1);
  recorder_ = nullptr;
  store_.FailWith(absl::OkStatus());
  Start();
  EXPECT_THAT(store_.AwaitWritten(1), ElementsAre("1*"));
}

// A store that is not ours any more, or newer, or that has lost our rights, keeps nothing out for
// good: somebody may set it right.
TEST_F(RecorderTest, WhateverIsWrongWithTheStoreIsAnOutage) {
  Start();
  for (absl::StatusCode code : {absl::StatusCode::kFailedPrecondition, absl::StatusCode::kInternal,
                                absl::StatusCode::kPermissionDenied, absl::StatusCode::kDataLoss}) {
    store_.FailWith(absl::Status(code, "no"));
    const size_t before = answers_.Await(0).size();
    Outcome("x");
    EXPECT_THAT(answers_.Await(before + 1).back(), "x spooled");
  }
  store_.FailWith(absl::OkStatus());
  EXPECT_THAT(store_.AwaitWritten(4), SizeIs(4));
}

TEST_F(RecorderTest, ARecordThatNoStoreTakesHoldsUpNoOther) {
  Start();
  store_.SetOpen(false);
  Outcome("first");
  store_.AwaitCalls(1);
  for (const char* name : {"1", "2", "poison", "3", "4", "5", "poison"}) Outcome(name);
  store_.SetOpen(true);
  EXPECT_THAT(answers_.Await(8),
              ElementsAre("first written", "1 written", "2 written", "poison INVALID_ARGUMENT",
                          "3 written", "4 written", "5 written", "poison INVALID_ARGUMENT"));
  store_.FailWith(away_);
  for (const char* name : {"6", "poison", "7"}) Outcome(name);
  answers_.Await(11);
  store_.FailWith(absl::OkStatus());
  EXPECT_THAT(store_.AwaitWritten(8), ElementsAre("first", "1", "2", "3", "4", "5", "6*", "7*"));
}

TEST_F(RecorderTest, AFullSpoolRefusesOutcomesAndDropsFacts) {
  RecorderOptions options = kQuick;
  options.outcomes_share = options.tenants_share = 1;
  Start(options, {.max_bytes = 400});
  store_.FailWith(away_);
  for (size_t i = 0; i < 20; ++i) {
    Outcome(absl::StrCat(i));
    answers_.Await(i + 1);
  }
  const std::vector<std::string> answers = answers_.Await(20);
  EXPECT_THAT(answers.front(), "0 spooled");
  EXPECT_THAT(answers.back(), "19 RESOURCE_EXHAUSTED");
  Fact("r");
  counts_.Await("dropped", 1);
  store_.FailWith(absl::OkStatus());
  counts_.Await("replayed", counts_["spooled"]);
  Outcome("after");
  EXPECT_THAT(answers_.Await(21).back(), "after written");
  EXPECT_EQ(counts_["refused"] + counts_["spooled"], 20);
  EXPECT_THAT(store_.AwaitWritten(0), SizeIs(counts_["spooled"] + 1)) << "none that was refused";
}

// The store takes nothing yet.
TEST_F(RecorderTest, OneTenantsOutcomesLeaveTheQueuesRoomToOthers) {
  RecorderOptions options = kQuick;
  options.max_queued_bytes = 16000;
  Start(options);
  store_.SetOpen(false);
  Fact("first");
  store_.AwaitCalls(1);
  auto outcome = [this](const std::string& tenant, int number) {
    recorder_->Record(Record(Seen{.client = absl::StrCat(number), .at = 1, .tenant = tenant}),
                      answers_.For(tenant));
  };
  int of_eve = 0;
  for (; counts_["refused"] == 0; ++of_eve) outcome("eve", of_eve);
  EXPECT_GT(of_eve, 5);
  outcome("ann", 0);
  EXPECT_EQ(counts_["refused"], 1);
  for (int i = 0; i < 3 * of_eve; ++i) {
    for (const char* tenant : {"bob", "carl", "dan"}) outcome(tenant, i);
  }
  const int64_t dropped = counts_["dropped"];
  Fact("fact");
  EXPECT_EQ(counts_["dropped"], dropped) << "half of the room is for facts";
  store_.SetOpen(true);
}

// Whether their requests exist is not known while the store is away.
TEST_F(RecorderTest, OutcomesLeaveTheSpoolsRoomToOthers) {
  Start(kQuick, {.max_bytes = 4000});
  store_.FailWith(away_);
  auto flood = [this](const std::string& tenant) {
    const size_t before = answers_.Await(0).size();
    for (int i = 0; i < 60; ++i) {
      recorder_->Record(Record(Seen{.client = absl::StrCat(i), .at = 1, .tenant = tenant}),
                        answers_.For(tenant));
      answers_.Await(before + i + 1);
    }
    const std::vector<std::string> answers = answers_.Await(before + 60);
    return std::count(answers.begin(), answers.end(), tenant + " spooled");
  };
  const auto of_eve = flood("eve");
  EXPECT_GT(of_eve, 5);
  EXPECT_LT(of_eve, 30) << "a quarter is hers";
  EXPECT_NEAR(static_cast<double>(flood("ann")), static_cast<double>(of_eve), 1);
  EXPECT_LE(flood("bob"), 1) << "half is for outcomes";
  Start(kQuick, {.max_bytes = 4000});
  EXPECT_LE(flood("cid"), 1) << "and still is, for a daemon that is started again";
  for (int i = 0; i < 10; ++i) Fact(absl::StrCat(i));
  store_.FailWith(absl::OkStatus());
  counts_.AwaitEmptySpool();
  EXPECT_EQ(counts_["dropped"], 0);
  store_.FailWith(away_);
  EXPECT_GE(flood("eve"), of_eve - 1) << "it has room again";
}

TEST_F(RecorderTest, WithRoomForLessOutcomesComeFirst) {
  RecorderOptions options = kQuick;
  options.outcomes_share = options.tenants_share = 1;
  Start(options, {.max_bytes = 400});
  store_.SetOpen(false);
  Fact("first");
  store_.AwaitCalls(1);
  for (int i = 0; i < 20; ++i) Fact(absl::StrCat(i));
  Outcome("o");
  store_.FailWith(away_);
  store_.SetOpen(true);
  EXPECT_THAT(answers_.Await(1), ElementsAre("o spooled"));
  EXPECT_EQ(counts_["dropped"], 20);
}

TEST_F(RecorderTest, TheEndWritesWhatWaits) {
  Start();
  store_.SetOpen(false);
  Outcome("1");
  store_.AwaitCalls(1);
  Outcome("2");
  store_.SetOpen(true);
  recorder_ = nullptr;
  EXPECT_THAT(answers_.Await(2), ElementsAre("1 written", "2 written"));
}

TEST_F(RecorderTest, WhatTheEndHasNoTimeForGoesToTheSpool) {
  Start({.flush = absl::ZeroDuration()});
  store_.SetOpen(false);
  Outcome("1");
  store_.AwaitCalls(1);
  Outcome("2");
  std::thread end([this] { recorder_ = nullptr; });
  store_.SetOpen(true);
  end.join();
  EXPECT_THAT(answers_.Await(2), SizeIs(2));
  Start();
  store_.AwaitWritten(2);
}

TEST_F(RecorderTest, TimesGrowThoughTheClockGoesBack) {
  Start();
  Fact("1", 1000);
  Outcome("1", 500);
  Fact("2", 400);
  Outcome("2", 1001);
  Fact("3", 1001 - 3700);  // by a clock that was wrong before
  Outcome("3", 1002 - 3700);
  recorder_ = nullptr;
  std::vector<int64_t> times_us;
  for (const v1::ExperimentRecord& record : store_.records()) {
    const absl::Time time =
        TimeOf(record.has_began() ? record.began().time() : record.outcome().received());
    times_us.push_back(absl::ToInt64Microseconds(time - TimeOf(Second(1000))));
  }
  EXPECT_THAT(times_us, ElementsAre(0, 1, 2, 1'000'000, -3699'000'000, -3698'000'000));
}

TEST_F(RecorderTest, ThreadsRecordWhileTheStoreComesAndGoes) {
  constexpr int kThreads = 4, kEach = 300;
  Start({.max_batch = 16,
         .first_backoff = absl::Microseconds(10),
         .last_backoff = absl::Microseconds(100)},
        {.segment_bytes = 2000});
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([this, thread] {
      for (int i = 0; i < kEach; ++i) Outcome(absl::StrCat(thread, "-", i));
    });
  }
  for (int i = 0; i < 50; ++i) {
    store_.FailWith(i % 2 == 0 ? away_ : absl::OkStatus());
    answers_.Await(static_cast<size_t>(i) * 20);
  }
  for (std::thread& thread : threads) thread.join();
  store_.FailWith(absl::OkStatus());
  answers_.Await(kThreads * kEach);
  std::map<std::string, int> next;
  for (const std::string& name : store_.AwaitWritten(kThreads * kEach)) {
    const std::vector<std::string> parts = absl::StrSplit(absl::StripSuffix(name, "*"), '-');
    EXPECT_EQ(parts[1], absl::StrCat(next[parts[0]]++)) << "of thread " << parts[0];
  }
}

// Real stores.

class RecorderStoreTest : public ::testing::TestWithParam<StoreKind> {
 protected:
  static constexpr SqlTimeouts kShort = {.connect = absl::Milliseconds(500),
                                         .statement = absl::Milliseconds(500),
                                         .transaction = absl::Seconds(5)};
  std::unique_ptr<StorePlace> place_ = GetParam().make();
  TemporaryFolder folder_;
};

INSTANTIATE_TEST_SUITE_P(Stores, RecorderStoreTest, ::testing::Values(kSqlite, kPostgres), NameOf);

TEST_P(RecorderStoreTest, NothingIsLostWhileTheStoreIsDown) {
  const std::unique_ptr<Store> store = place_->Open(kShort);
  ASSERT_TRUE(store->Create(Definition({.name = "x"})).ok());
  Counts counts;
  Answers answers;
  auto recorder =
      std::make_unique<Recorder>(*store, *Spool::Open(folder_.File("spool")), counts, kQuick);
  size_t recorded = 0;
  auto record = [&](int how_many) {
    for (int i = 0; i < how_many; ++i, ++recorded) {
      const std::string name = absl::StrCat("r", recorded);
      recorder->Record(Record(Begun{.id = name, .at = recorded * 1.0}));
      recorder->Record(Ended(name, recorded + 0.5));
      recorder->Record(Record(Seen{.client = name, .at = recorded + 0.7}), answers.For(name));
    }
    answers.Await(recorded);
  };
  record(10);
  EXPECT_THAT(answers.Await(10), Contains("r9 written"));
  place_->GoAway();
  record(10);
  EXPECT_THAT(answers.Await(20), Contains("r19 spooled"));
  counts.Await("outage times", 3);
  place_->ComeBack();
  counts.Await("replayed", 30);
  record(10);
  EXPECT_THAT(answers.Await(30).back(), "r29 written");
  recorder = nullptr;
  int rows = 0;
  auto check = [&rows](const RequestRow& row) {
    EXPECT_EQ(row.id, absl::StrCat("r", rows++));
    EXPECT_TRUE(row.end.has_value()) << row.id;
    EXPECT_THAT(row.outcomes, SizeIs(1)) << row.id;
    return absl::OkStatus();
  };
  EXPECT_TRUE(store->ReadRequests({.experiment = "x"}, check).ok());
  EXPECT_EQ(rows, 30);
}

// kill -9. The child, recorder_crash.cc, records outcomes without end and prints the number of each
// that was acknowledged.

class Child {
 public:
  Child(const std::string& where, const std::string& spool, int64_t first) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) abort();
    const std::vector<std::string> command = {EPIKV_RECORDER_CRASH, where, spool,
                                              absl::StrCat(first)};
    std::vector<char*> arguments;
    for (const std::string& each : command) arguments.push_back(const_cast<char*>(each.c_str()));
    arguments.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      dup2(ends[1], STDOUT_FILENO);
      execv(arguments[0], arguments.data());
      _exit(1);
    }
    close(ends[1]);
    out_ = ends[0];
  }
  ~Child() { close(out_); }

  void AwaitFirstWord() {
    pollfd end{.fd = out_, .events = POLLIN, .revents = 0};
    EXPECT_EQ(poll(&end, 1, int(absl::ToInt64Milliseconds(kGenerous))), 1);
  }
  // What it says until the store, not the spool, has acknowledged one.
  std::string ReadUntilWritten() {
    std::string text;
    while (text.find('w') == text.npos && Read(text, kGenerous)) {
    }
    return text;
  }
  // What it says for so long.
  std::string ReadFor(absl::Duration time) {
    std::string text;
    const absl::Duration end = SteadyTime() + time;
    while (SteadyTime() < end && Read(text, end - SteadyTime())) {
    }
    return text;
  }
  // The rest of what it said; a line that was cut off is none.
  std::string Kill() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    std::string text;
    while (Read(text, absl::InfiniteDuration())) {
    }
    return text;
  }

 private:
  // False: nothing more in that time.
  bool Read(std::string& text, absl::Duration time) {
    pollfd end{.fd = out_, .events = POLLIN, .revents = 0};
    const int limit =
        time == absl::InfiniteDuration() ? 60'000 : int(absl::ToInt64Milliseconds(time));
    if (poll(&end, 1, limit) <= 0) return false;
    char part[4096];
    const ssize_t got = read(out_, part, sizeof(part));
    if (got > 0) text.append(part, static_cast<size_t>(got));
    return got > 0;
  }

  pid_t pid_ = -1;
  int out_ = -1;
};

// How many kills: 20, or what EPIKV_KILLS says (tests/soak.sh kills: 1000).
int Kills() {
  int kills = 0;
  const char* given = getenv("EPIKV_KILLS");
  return given != nullptr && absl::SimpleAtoi(given, &kills) ? kills : 20;
}

// Of the child's lines.
struct Acknowledged {
  std::set<int64_t> written;
  std::set<int64_t> spooled;
  std::set<int64_t> wrong;  // neither, which must not be

  void Take(const std::string& text) {
    std::vector<std::string> lines = absl::StrSplit(text, '\n');
    lines.pop_back();  // what follows the last end of a line
    for (const std::string& line : lines) {
      int64_t number = 0;
      if (!absl::SimpleAtoi(line.substr(1), &number)) number = -1;
      (line[0] == 'w' ? written : line[0] == 's' ? spooled : wrong).insert(number);
    }
  }
};

class KillTest : public ::testing::TestWithParam<StoreKind> {};
const StoreKind kSyncedPostgres = {"Postgres", [] {
                                     static PostgresServer server(PostgresServer::Sync::kOn);
                                     return std::make_unique<PostgresPlace>(server);
                                   }};
INSTANTIATE_TEST_SUITE_P(Stores, KillTest, ::testing::Values(kSqlite, kSyncedPostgres), NameOf);

TEST_P(KillTest, NothingAcknowledgedIsLostOrCountedTwice) {
  const int kills = Kills();
  const std::unique_ptr<StorePlace> place = GetParam().make();
  const TemporaryFolder folder;
  std::mt19937 random(11);
  ASSERT_TRUE(place->Open()->Create(Definition({.name = "x", .window = absl::Hours(1)})).ok());
  Acknowledged all;
  int64_t first = 0, outages = 0;
  const absl::Duration begin = SteadyTime();
  for (int round = 0; round < kills; ++round) {
    if (round > 0 && round % 50 == 0) {
      const absl::Duration left = (SteadyTime() - begin) / round * (kills - round);
      fprintf(stderr, "%s: %d of %d kills, %.0f s left\n", GetParam().name.c_str(), round, kills,
              absl::ToDoubleSeconds(left));
    }
    const bool away = random() % 4 == 0;
    if (away) place->GoAway();
    Child child(place->where(), folder.File("spool"), first);
    // It dies in its start, after its first word, or once the spool of those before it is empty.
    std::string text;
    const uint32_t when = random() % 4;
    if (when == 1) child.AwaitFirstWord();
    if (when > 1 && !away) text = child.ReadUntilWritten();
    text += child.ReadFor(absl::Microseconds(random() % 80'000));
    if (away && random() % 2 == 0) {  // some see it come back
      place->ComeBack();
      text += child.ReadFor(absl::Microseconds(random() % 80'000));
    }
    text += child.Kill();
    place->ComeBack();
    all.Take(text);
    outages += away;
    // Some that were acknowledged come again: clients repeat what they have not heard.
    for (const std::set<int64_t>* numbers : {&all.written, &all.spooled}) {
      if (!numbers->empty()) first = std::max(first, *numbers->rbegin() - 20);
    }
  }
  EXPECT_THAT(all.wrong, IsEmpty());
  const std::unique_ptr<Store> store = place->Open();
  {
    Counts counts;
    const Recorder recorder(*store, *Spool::Open(folder.File("spool")), counts, kQuick);
    ASSERT_NO_FATAL_FAILURE(counts.AwaitEmptySpool());
  }
  std::map<int64_t, int> found;
  auto count = [&found](const RequestRow& row) {
    for (const OutcomeRow& outcome : row.outcomes) {
      EXPECT_EQ(row.id, absl::StrCat("id", int64_t(outcome.value)));
      ++found[int64_t(outcome.value)];
    }
    return absl::OkStatus();
  };
  ASSERT_TRUE(store->ReadRequests({.experiment = "x"}, count).ok());
  int64_t lost = 0, twice = 0;
  for (const std::set<int64_t>* numbers : {&all.written, &all.spooled}) {
    for (int64_t number : *numbers) lost += found.count(number) == 0;
  }
  for (const auto& [number, times] : found) twice += times > 1;
  EXPECT_EQ(lost, 0);
  EXPECT_EQ(twice, 0);
  EXPECT_THAT(place->Execute("SELECT 1 FROM waiting_outcomes"), IsEmpty());
  EXPECT_GT(all.written.size(), 0u);
  EXPECT_TRUE(outages == 0 || !all.spooled.empty());
  printf(
      "%s: %d kills, %d with an outage; acknowledged %zu by the store, %zu by the spool; in the "
      "store %zu; lost %d, twice %d\n",
      GetParam().name.c_str(), kills, int(outages), all.written.size(), all.spooled.size(),
      found.size(), int(lost), int(twice));
}

}  // namespace recorder_test
}  // namespace epikv
