#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/admission/admission.h"
#include "runtime/engine/engine.h"
#include "runtime/text/tokenizer.h"
#include "tests/fixtures/fake_executor.h"
#include "tests/fixtures/fake_model.h"
#include "tests/fixtures/fake_policies.h"

// What a crowd gets that asks for more than there is: simulated, on a clock that the steps move.

namespace epikv {
namespace overload_test {

constexpr absl::Duration kRun = absl::Seconds(120);
constexpr int64_t kPrompt = 32;

struct Outcome {
  double goodput = 0;  // output tokens per second of requests that met their deadlines
  int64_t refused = 0, dropped = 0, missed = 0;
  int64_t most_waiting = 0;
  // Refused because the queue was full, and come again when told; and how many of them got in.
  int64_t retried = 0, let_in = 0;
};

class CountingSink final : public RequestSink {
 public:
  explicit CountingSink(std::function<void(const Finished&)> on_finished)
      : on_finished_(std::move(on_finished)) {}
  bool Ready() const override { return true; }
  void OnDelta(Delta) override {}
  void OnFinished(Finished finished) override { on_finished_(finished); }

 private:
  const std::function<void(const Finished&)> on_finished_;
};

// Each simulates an engine of its own, from the beginning.
class OverloadTest : public ::testing::TestWithParam<int64_t> {
 protected:
  struct Load {
    double per_second = 0;  // Poisson; 0: as many at once as may run, one for one that ends
    absl::Duration deadline = absl::InfiniteDuration();
    bool refuse = true;
    absl::Duration run = kRun;
    int64_t max_waiting = 1 << 20;
    int64_t burst = 0;  // requests at once, after half of the run
  };

  Outcome Simulate(const Load& load) {
    now_ = absl::FromUnixSeconds(1000);
    const absl::Time begin = now_, end = now_ + load.run;
    std::mt19937 random(7);
    auto script = std::make_shared<FakeScript>();
    script->next = [](int32_t) { return 5; };  // no ends
    script->on_forward = [this](absl::Span<const WorkItem> items) {
      int64_t tokens = 0;
      for (const WorkItem& item : items) tokens += static_cast<int64_t>(item.tokens.size());
      now_ += absl::Milliseconds(5) + tokens * absl::Microseconds(500);
      return absl::OkStatus();
    };
    EngineObserver observer;
    Engine engine({.refuse_infeasible_deadlines = load.refuse,
                   .kv_capacity_bytes = 1 << 30,
                   .max_running_requests = GetParam()},
                  std::make_unique<FakeExecutor>(script, kFakeBytesPerToken), *tokenizer_, observer,
                  [this] { return now_; });
    Outcome outcome;
    RetryTimes retry_times;
    std::multiset<absl::Time> returning;
    int64_t burst = load.burst;
    int64_t next = 0;
    Outlook door = engine.outlook();  // with what came since, as EngineThread has it
    auto submit = [&](absl::Time arrival, bool again = false) {
      RequestOptions options{.id = absl::StrCat(next++),
                             .prompt = std::vector<int32_t>(kPrompt, 0),
                             .arrival = arrival,
                             .deadline = arrival + load.deadline};
      options.stop.max_output_tokens = std::uniform_int_distribution<int64_t>(16, 48)(random);
      Request request = std::get<Request>(admission_.Resolve(std::move(options)));
      const Forecast forecast = Predict(door, request, now_);
      if (load.refuse && forecast.least_wait + forecast.least_run > request.deadline - now_) {
        ++outcome.refused;
        return;
      }
      const Work work = WorkOf(request);
      if (door.waiting.total().requests >= static_cast<double>(load.max_waiting)) {
        if (again) return;
        returning.insert(now_ + retry_times.After(absl::ZeroDuration(), work, door, now_));
        ++outcome.retried;
        return;
      }
      if (again) ++outcome.let_in;
      door.waiting.Add(request.scheduling, work);
      const absl::Time deadline = request.deadline;
      engine.Submit(std::move(request),
                    std::make_shared<CountingSink>([&, deadline](const Finished& finished) {
                      if (finished.status.ok() && now_ <= deadline) {
                        outcome.goodput += finished.output_tokens / absl::ToDoubleSeconds(load.run);
                      } else if (finished.output_tokens == 0) {
                        ++outcome.dropped;
                      } else {
                        ++outcome.missed;
                      }
                    }));
    };
    absl::Time arrival = begin;
    std::exponential_distribution<double> gap(load.per_second > 0 ? load.per_second : 1);
    while (now_ < end || !returning.empty()) {
      while (load.per_second > 0 && arrival <= now_ && now_ < end) {
        submit(arrival);
        arrival += absl::Seconds(gap(random));
      }
      if (now_ >= begin + load.run / 2) {
        for (; burst > 0; --burst) submit(now_);
      }
      while (!returning.empty() && *returning.begin() <= now_) {
        returning.erase(returning.begin());
        submit(now_, /*again=*/true);
      }
      while (load.per_second == 0 && engine.running() + engine.waiting() < GetParam()) submit(now_);
      outcome.most_waiting = std::max(outcome.most_waiting, engine.waiting());
      if (!engine.Step()) now_ += absl::Milliseconds(1);
      door = engine.outlook();
    }
    const Outcome at_end = outcome;  // what is cut off at the end is nobody's fault
    engine.CancelAll(absl::CancelledError(""));
    return at_end;
  }

  // Three times what a request takes alone.
  static absl::Duration Deadline() {
    return 3 * (absl::Milliseconds(5) + kPrompt * absl::Microseconds(500) +
                31 * (absl::Milliseconds(5) + absl::Microseconds(500)));
  }

  absl::Time now_;
  const Admission admission_{FakeManifest(), EveryKindOfPolicy(),
                             AdmissionLimits{.kv_capacity_bytes = 1 << 30}};
  const std::unique_ptr<Tokenizer> tokenizer_ = *Tokenizer::FromJson(FakeTokenizerJson());
};

// 2 x capacity, deadlines of 3 x the idle median: what is served is worth nearly as much as at
// capacity, and the queue does not grow.
TEST_P(OverloadTest, GoodputAtTwiceTheCapacityIsNearlyThatAtCapacity) {
  const double capacity = Simulate({}).goodput;
  const double per_second = capacity / 32;  // the mean output
  const Outcome at = Simulate({.per_second = per_second, .deadline = Deadline()});
  const Outcome twice = Simulate({.per_second = 2 * per_second, .deadline = Deadline()});
  const Outcome longer =
      Simulate({.per_second = 2 * per_second, .deadline = Deadline(), .run = 3 * kRun});
  RecordProperty("capacity", absl::StrCat(capacity));
  RecordProperty("at_capacity", absl::StrCat(at.goodput));
  RecordProperty("at_twice", absl::StrCat(twice.goodput));
  RecordProperty("refused_dropped_missed_at_twice",
                 absl::StrCat(twice.refused, " ", twice.dropped, " ", twice.missed));
  EXPECT_GE(twice.goodput, .9 * at.goodput);
  EXPECT_GE(longer.goodput, .9 * at.goodput);
  EXPECT_LE(longer.most_waiting, 2 * twice.most_waiting) << "it does not grow with time";
  EXPECT_GT(twice.refused + twice.dropped, twice.missed) << "most hear of it before they ran";
}

// So the test above can fail.
TEST_P(OverloadTest, WithoutRefusalsGoodputIsLost) {
  const double capacity = Simulate({}).goodput;
  const double per_second = capacity / 32;
  const Outcome at = Simulate({.per_second = per_second, .deadline = Deadline()});
  const Outcome twice =
      Simulate({.per_second = 2 * per_second, .deadline = Deadline(), .refuse = false});
  EXPECT_LT(twice.goodput, .7 * at.goodput);
}

TEST_P(OverloadTest, NobodyIsTurnedAwayWhereThereIsTimeForAll) {
  const double capacity = Simulate({}).goodput;
  const Outcome half = Simulate({.per_second = capacity / 32 / 2, .deadline = absl::Seconds(20)});
  EXPECT_EQ(half.refused + half.dropped + half.missed, 0);
}

// Whoever is refused because the queue is full comes again when it was told to, once.
TEST_P(OverloadTest, RetriesSucceedMoreOftenThanNot) {
  const double per_second = Simulate({}).goodput / 32;
  const Outcome lasting = Simulate({.per_second = 2 * per_second, .max_waiting = 20});
  RecordProperty("retried_let_in", absl::StrCat(lasting.retried, " ", lasting.let_in));
  EXPECT_GT(lasting.retried, 500);
  EXPECT_GT(lasting.let_in, lasting.retried / 2);
  // One crowd, for which each is told a time of its own.
  const Outcome crowd =
      Simulate({.per_second = per_second / 4, .max_waiting = 20, .burst = GetParam() + 100});
  EXPECT_GT(crowd.retried, 50);
  EXPECT_GT(crowd.let_in, crowd.retried * 9 / 10);
}

// Places for running requests: where a queue forms, and where all run and slow each other.
INSTANTIATE_TEST_SUITE_P(Places, OverloadTest, ::testing::Values(4, 16, 256));

}  // namespace overload_test
}  // namespace epikv
