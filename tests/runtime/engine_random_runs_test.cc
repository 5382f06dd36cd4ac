#include "runtime/engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/admission/queue.h"
#include "runtime/base/reason.h"
#include "tests/fixtures/engine_fixture.h"

namespace epikv {
namespace engine_random_runs_test {

using testing::Not;
using testing::SizeIs;

// Laws over random runs.

// What `full` and every policy must generate here, for the fake's next token knows no past.
struct Expected {
  std::vector<int32_t> tokens;
  std::string reason;
};
Expected ExpectedOf(const RequestOptions& options) {
  Expected expected{.reason = "length"};
  if (!options.forced.empty()) return {options.forced, "length"};
  std::string text;
  int32_t token = options.prompt.back();
  for (int64_t i = 0; i < *options.stop.max_output_tokens; ++i) {
    token = (token + 1) % kFakeVocab;
    expected.tokens.push_back(token);
    const auto& stops = options.stop.tokens;
    if (std::find(stops.begin(), stops.end(), token) != stops.end()) {
      expected.reason = "stop token";
    } else if (token == kEnd) {
      expected.reason = "end";
    } else {
      absl::StrAppend(&text, i > 0 ? " " : "", "w", token);
      for (const std::string& stop : options.stop.strings) {
        if (text.find(stop) != std::string::npos) expected.reason = "stop string";
      }
    }
    if (expected.reason != "length") break;
  }
  return expected;
}

class EngineLaws : public EngineTest, public testing::WithParamInterface<int> {
 protected:
  int64_t Draw(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random_);
  }
  bool OneIn(int64_t n) { return Draw(1, n) == 1; }

  // Whatever can be asked for; some of it will be refused.
  RequestOptions RandomRequest(const std::string& id) {
    const char* const policies[] = {"at_end", "by_chunk", "full", "refuses"};
    // One after the other: compilers differ in the order of arguments.
    const int64_t budget = Draw(1, 120);
    const char* const policy = policies[Draw(0, 3)];
    const int64_t output = Draw(1, 40), prompt = Draw(1, OneIn(4) ? 300 : 40);
    RequestOptions options = Ask(id, prompt, output, policy, budget);
    std::rotate(options.prompt.begin(), options.prompt.begin() + Draw(0, options.prompt.size() - 1),
                options.prompt.end());
    if (options.kv.policy != "full") {
      options.kv.params["slack"] = OneIn(2) ? 0 : Draw(0, 30);
    } else {
      options.kv.budget = {};
    }
    if (OneIn(4)) {
      options.forced.resize(Draw(1, 40));
      for (int32_t& token : options.forced) token = Draw(0, kFakeVocab - 1);
      options.stop.max_output_tokens = options.forced.size();
      options.force_in_chunks = options.kv.policy == "full" && OneIn(2);
    }
    if (OneIn(5)) options.stop.tokens = {static_cast<int32_t>(Draw(0, 62))};
    if (OneIn(5)) options.stop.strings = {absl::StrCat("w", Draw(10, 62))};
    if (OneIn(6)) options.deadline = now_ + absl::Seconds(Draw(1, 200));
    options.output = {
        .logprobs = OneIn(2), .kv_trace = OneIn(3), .residual_steps = OneIn(3), .kept = OneIn(3)};
    return options;
  }

  // Faults of every kind, each in one of so many calls.
  void FailNowAndThen(int64_t one_in) {
    script_->on_open = [=, this](const Request& request) { return Hit(request.id, one_in); };
    script_->on_item = [=, this](const WorkItem& item) { return Hit(item.request->id, one_in); };
    script_->on_settle = [=, this](const WorkItem& item) { return Hit(item.request->id, one_in); };
    script_->on_forward = [=, this](absl::Span<const WorkItem> items) {
      CheckHeadOfQueue();
      if (guilty_ != "") return HasRequest(items, guilty_) ? Boom() : absl::OkStatus();
      if (!OneIn(one_in)) return absl::OkStatus();
      // Nobody's fault, if there is no guilty one: then each works alone.
      if (OneIn(2) || items.size() == 1) guilty_ = items[Draw(0, items.size() - 1)].request->id;
      if (guilty_ != "") hit_.insert(guilty_);
      return Boom();
    };
  }
  absl::Status Hit(const std::string& id, int64_t one_in) {
    if (!OneIn(one_in * 20)) return absl::OkStatus();
    hit_.insert(id);
    return Boom();
  }

  // Submits now and then, until all are.
  void SubmitSome(int64_t requests) {
    while (static_cast<int64_t>(asked_.size()) < requests && OneIn(3)) {
      const RequestOptions options = RandomRequest(absl::StrCat("r", asked_.size()));
      const auto resolved = admission_->Resolve(options);
      if (!std::holds_alternative<Request>(resolved)) continue;
      demand_[options.id] = std::get<Request>(resolved).demand.peak_bytes();
      asked_[options.id] = options;
      order_.push_back(options.id);
      Submit(options);
    }
  }
  // Clients cancel, pause and go on.
  void DisturbSome() {
    for (auto& [id, output] : outputs_) {
      if (output->ended()) continue;
      if (OneIn(50)) output->ready = !output->ready;
      if (!OneIn(2000)) continue;
      cancelled_.insert(id);
      ASSERT_TRUE(engine_->Cancel(id, absl::CancelledError("")));
    }
    if (OneIn(100)) {
      for (auto& [id, output] : outputs_) output->ready = true;
    }
    now_ += absl::Milliseconds(Draw(0, 100));
  }

  // Once all are admitted that can be: the head of the queue lacks a place, or room.
  void CheckHeadOfQueue() const {
    if (engine_->waiting() == 0 || engine_->running() >= max_running_) return;
    const auto& admitted = observer_.admitted;
    for (const std::string& id : order_) {
      if (outputs_.at(id)->ended()) continue;
      if (std::find(admitted.begin(), admitted.end(), id) != admitted.end()) continue;
      ASSERT_GT(engine_->ledger().reserved() + demand_.at(id), engine_->ledger().capacity());
      return;
    }
    FAIL() << "somebody waits who was not asked for";
  }
  void CheckAfterStep() const {
    ASSERT_LE(engine_->ledger().reserved(), engine_->ledger().capacity());
    ASSERT_LE(script_->used_bytes, engine_->ledger().reserved()) << "used beyond what is reserved";
    ASSERT_EQ(script_->open_sequences, engine_->running());
  }
  void CheckOutput(const std::string& id) const {
    const RequestOptions& options = asked_.at(id);
    const Output& output = *outputs_.at(id);
    const Expected expected = ExpectedOf(options);
    ASSERT_THAT(output.finished, SizeIs(1));
    const Finished& finished = output.finished.at(0);
    EXPECT_LE(finished.kv.peak_bytes, demand_.at(id));
    EXPECT_EQ(finished.output_tokens, static_cast<int64_t>(output.tokens.size()));
    const bool has_steps =
        options.output.residual_steps && !options.force_in_chunks && !output.tokens.empty();
    EXPECT_EQ(output.residual_steps.size(), has_steps ? output.tokens.size() - 1 : 0);
    if (finished.status.ok()) {
      EXPECT_EQ(output.tokens, expected.tokens);
      EXPECT_EQ(output.reason(), expected.reason);
      return;
    }
    ASSERT_LE(output.tokens.size(), expected.tokens.size());
    EXPECT_TRUE(std::equal(output.tokens.begin(), output.tokens.end(), expected.tokens.begin()));
    if (finished.reason == FinishReason::kError) {
      EXPECT_TRUE(hit_.contains(id)) << "an innocent failed";
    } else if (finished.reason == FinishReason::kCancelled) {
      EXPECT_TRUE(cancelled_.contains(id));
    } else {
      EXPECT_LE(options.deadline, now_);
    }
  }

  std::mt19937 random_{static_cast<uint32_t>(GetParam())};
  std::map<std::string, RequestOptions> asked_;
  std::map<std::string, int64_t> demand_;  // bytes
  std::vector<std::string> order_;         // of arrival
  std::set<std::string> hit_, cancelled_;
  std::string guilty_;                                    // of the step's forward
  std::vector<std::pair<Work, SchedulingOptions>> came_;  // since the last step
  int64_t max_running_ = 0;
};

TEST_P(EngineLaws, HoldInRandomRuns) {
  constexpr int64_t kRequests = 300;
  const int64_t chunk = Draw(1, 64);
  max_running_ = Draw(2, 24);
  Build({.kv_tokens = Draw(700, 3000),
         .engine = {.scheduler = {.max_step_tokens = Draw(1, 128),
                                  .prefill_chunk_tokens = chunk,
                                  .fixed_chunk_tokens = OneIn(4) ? chunk : 0},
                    .max_running_requests = max_running_,
                    .max_trace_victims = Draw(10, 200)}});
  FailNowAndThen(40);
  for (int step = 0; engine_->running() + engine_->waiting() > 0 ||
                     static_cast<int64_t>(asked_.size()) < kRequests;
       ++step) {
    ASSERT_LT(step, 200000) << "it never ends";
    SubmitSome(kRequests);
    DisturbSome();
    guilty_ = "";
    if (!engine_->Step()) CheckHeadOfQueue();
    CheckAfterStep();
    if (HasFailure()) FAIL() << "at step " << step;
  }
  ExpectNothingHeld();

  std::vector<int> numbers;
  for (const std::string& id : observer_.admitted) numbers.push_back(std::stoi(id.substr(1)));
  EXPECT_TRUE(std::is_sorted(numbers.begin(), numbers.end())) << "first come, first served";
  int64_t well = 0, rounds = 0;
  for (const std::string& id : order_) {
    SCOPED_TRACE(id);
    CheckOutput(id);
    const Finished& finished = outputs_[id]->finished.at(0);
    well += finished.status.ok();
    rounds += finished.kv.rounds;
  }
  // Not vacuous.
  EXPECT_GT(well, kRequests / 5);
  EXPECT_LT(well, kRequests);
  EXPECT_GT(rounds, 200);
}

// With priorities, tenants and ageing, whoever leaves and fails: a queue beside the engine's says
// who is next.
TEST_P(EngineLaws, AdmitsTheHeadOfTheQueueAndNobodyElse) {
  constexpr int64_t kRequests = 300;
  max_running_ = Draw(6, 16);
  const QueueRule rule{.ageing = absl::Seconds(Draw(1, 3)), .quantum_tokens = Draw(1, 500)};
  Build({.kv_tokens = Draw(400, 600),
         .engine = {.queue = rule, .max_running_requests = max_running_}});
  RequestQueue queue(rule);
  std::map<std::string, SequenceId> waiting;
  int64_t risen = 0, for_room = 0;
  script_->on_open = [&](const Request& request) {
    EXPECT_EQ(queue.Head(now_), waiting[request.id]) << request.id;
    queue.PopHead();
    waiting.erase(request.id);
    const bool rises = request.scheduling.priority != Priority::kHigh;
    if (rises && now_ - request.arrival > rule.ageing) ++risen;
    return Hit(request.id, 3);
  };
  observer_.on_finished = [&](const Request& request) {
    const auto ended = waiting.find(request.id);
    if (ended == waiting.end()) return;
    queue.Remove(ended->second);
    waiting.erase(ended);
  };
  // Once all are admitted that can be.
  auto check_head = [&] {
    if (engine_->running() >= max_running_) return;  // it is not chosen before there is a place
    const std::optional<SequenceId> head = queue.Head(now_);
    for (const auto& [id, number] : waiting) {
      if (number != head) continue;
      EXPECT_GT(engine_->ledger().reserved() + demand_.at(id), engine_->ledger().capacity());
      ++for_room;
    }
  };
  script_->on_forward = [&](absl::Span<const WorkItem>) {
    check_head();
    return absl::OkStatus();
  };
  int64_t next = 0;
  while (engine_->running() + engine_->waiting() > 0 || next < kRequests) {
    while (next < kRequests && OneIn(3)) {
      RequestOptions options = RandomRequest(absl::StrCat("r", asked_.size()));
      options.scheduling = {.priority = static_cast<Priority>(Draw(0, 2)),
                            .tenant = absl::StrCat(Draw(0, 3))};
      auto resolved = admission_->Resolve(options);
      if (!std::holds_alternative<Request>(resolved)) continue;
      const Request& request = std::get<Request>(resolved);
      demand_[options.id] = request.demand.peak_bytes();
      asked_[options.id] = options;
      waiting[options.id] = SequenceId{next++};
      queue.Push(waiting[options.id], request, now_);
      Submit(options);
    }
    DisturbSome();
    if (!engine_->Step()) check_head();
    ASSERT_EQ(queue.size(), engine_->waiting());
    ASSERT_FALSE(HasFailure());
  }
  ExpectNothingHeld();
  EXPECT_GT(risen, 0);
  EXPECT_GT(for_room, 0);
  observer_.on_finished = nullptr;
}

// Steps that take as long as they have tokens: no request is admitted or done sooner than was said
// to be the least when it came, whatever waits and runs.
TEST_P(EngineLaws, NothingIsFasterThanTheLeastForecast) {
  max_running_ = Draw(2, 5);
  Build({.kv_tokens = Draw(520, 700), .engine = {.max_running_requests = max_running_}});
  script_->next = [](int32_t) { return 5; };
  script_->on_forward = [&](absl::Span<const WorkItem> items) {
    int64_t tokens = 0;
    for (const WorkItem& item : items) tokens += static_cast<int64_t>(item.tokens.size());
    now_ += absl::Milliseconds(5) + tokens * absl::Microseconds(200);
    return absl::OkStatus();
  };
  // The fastest steps that there are: one token to decode, and as many to prefill as fit.
  Submit(Ask("fastest decode", 1, 30));
  RunAll();
  Submit(Ask("fastest prefill", 256, 1));
  Submit(Ask("and its half", 256, 1));
  RunAll();
  struct Said {
    absl::Time at;
    Forecast forecast;
  };
  std::map<std::string, Said> said;
  const bool priorities = GetParam() % 2 == 0;
  int64_t waits = 0;
  double predicted = 0, waited = 0;
  for (int64_t i = 0; i < 300; ++i) {
    while (OneIn(2)) {
      RequestOptions options = Ask(absl::StrCat("r", said.size()), Draw(1, 200), Draw(1, 60));
      if (priorities) options.scheduling.priority = static_cast<Priority>(Draw(0, 2));
      const auto resolved = admission_->Resolve(options);
      if (!std::holds_alternative<Request>(resolved)) continue;
      // As after the step that is over, with what came since.
      Outlook outlook = engine_->outlook();
      for (const auto& [work, scheduling] : came_) outlook.waiting.Add(scheduling, work);
      said[options.id] = {now_, Predict(outlook, std::get<Request>(resolved), now_)};
      came_.push_back({WorkOf(std::get<Request>(resolved)), options.scheduling});
      Submit(options);
    }
    came_.clear();
    for (int64_t steps = Draw(1, 6); steps > 0; --steps) engine_->Step();
  }
  RunAll();
  for (const auto& [id, forecast] : said) {
    const Timings& timings = outputs_[id]->finished.at(0).timings;
    const absl::Duration run = timings.prefill + timings.decode;
    EXPECT_GE(timings.queue + absl::Nanoseconds(1), forecast.forecast.least_wait) << id;
    EXPECT_GE(run + absl::Nanoseconds(1), forecast.forecast.least_run) << id;
    if (forecast.forecast.least_wait > absl::ZeroDuration()) ++waits;
    if (!forecast.forecast.wait.has_value()) continue;
    predicted += absl::ToDoubleSeconds(*forecast.forecast.wait);
    waited += absl::ToDoubleSeconds(timings.queue);
  }
  EXPECT_GT(waits, 20) << "not vacuous";
  if (priorities) return;  // who comes later may go first: that nobody can predict
  EXPECT_GT(predicted, waited / 2);
  EXPECT_LT(predicted, waited * 2);
}

// What a request keeps, and what it is told, does not depend on its company: not on the room that
// it left for chunks, and not on whose forward failed.
TEST_P(EngineLaws, RequestsGetTheSameAloneAndInCompany) {
  constexpr int64_t kRequests = 60;
  const SchedulerOptions crowded{.max_step_tokens = Draw(1, 60),
                                 .prefill_chunk_tokens = Draw(1, 40)};
  max_running_ = 20;
  Build({.engine = {.scheduler = crowded, .max_running_requests = max_running_}});
  FailNowAndThen(40);
  while (static_cast<int64_t>(asked_.size()) < kRequests) SubmitSome(kRequests);
  do {
    DisturbSome();
    guilty_ = "";
    engine_->Step();
  } while (engine_->running() + engine_->waiting() > 0);

  script_->on_open = nullptr;
  script_->on_forward = nullptr;
  script_->on_item = script_->on_settle = nullptr;
  Build({.engine = {.scheduler = {.max_step_tokens = 1 << 20,
                                  .prefill_chunk_tokens = crowded.prefill_chunk_tokens}}});
  for (const std::string& id : order_) {
    const Output& in_company = *outputs_[id];
    if (!in_company.finished.at(0).status.ok()) continue;
    SCOPED_TRACE(id);
    RequestOptions options = asked_[id];
    options.id += " alone";
    options.deadline = absl::InfiniteFuture();
    const Output& alone = *Submit(options);
    RunAll();
    EXPECT_EQ(in_company.tokens, alone.tokens);
    EXPECT_EQ(in_company.text, alone.text);
    EXPECT_EQ(in_company.logprobs, alone.logprobs);
    EXPECT_EQ(in_company.residual_steps, alone.residual_steps);
    const KvUsage &kv = in_company.finished.at(0).kv, &kv_alone = alone.finished.at(0).kv;
    EXPECT_EQ(kv.kept, kv_alone.kept);
    EXPECT_EQ(kv.rounds, kv_alone.rounds);
    EXPECT_EQ(kv.evicted_entries, kv_alone.evicted_entries);
    EXPECT_EQ(kv.peak_bytes, kv_alone.peak_bytes);
    ASSERT_EQ(in_company.evictions.size(), alone.evictions.size());
    for (size_t i = 0; i < alone.evictions.size(); ++i) {
      EXPECT_EQ(in_company.evictions[i].at_token, alone.evictions[i].at_token);
      EXPECT_EQ(in_company.evictions[i].victims[0].index, alone.evictions[i].victims[0].index);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, EngineLaws, testing::Range(1, 13));

}  // namespace engine_random_runs_test
}  // namespace epikv
