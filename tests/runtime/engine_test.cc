#include "runtime/engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "runtime/admission/admission.h"
#include "runtime/admission/queue.h"
#include "runtime/base/reason.h"
#include "runtime/text/tokenizer.h"
#include "tests/fixtures/fake_executor.h"
#include "tests/fixtures/fake_model.h"
#include "tests/fixtures/fake_policies.h"

namespace epikv {
namespace {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

// K and V, and one slot table's index and position: what a policy of token granularity stores.
constexpr int64_t kTokenBytes = kFakeBytesPerToken + 8;
constexpr int64_t kLanes = 4;
constexpr int32_t kEnd = 63;

std::string ReasonName(FinishReason reason) {
  const char* const names[] = {"length",    "end",      "stop token", "stop string",
                               "cancelled", "deadline", "error"};
  return names[static_cast<int>(reason)];
}

// What happened, a line each, in order.
class EventLog {
 public:
  template <typename... Args>
  void Add(const Args&... args) {
    lines_.push_back(absl::StrCat(args...));
  }
  // Since the last call.
  std::string Take() {
    std::string text;
    for (const std::string& line : std::exchange(lines_, {})) absl::StrAppend(&text, line, "\n");
    return text;
  }

 private:
  std::vector<std::string> lines_;
};

// What one request got. Whoever submits it keeps it.
struct Output {
  bool ready = true;
  std::string text;
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  std::vector<bool> greedy;
  std::vector<std::vector<TokenLogprob>> top_logprobs;
  std::vector<std::vector<float>> residual_steps;
  std::vector<EvictionTrace> evictions;
  std::vector<PromptLogprobs> prompt;  // by event
  std::vector<Finished> finished;      // one, in the end

  bool ended() const { return !finished.empty(); }
  std::string reason() const { return ended() ? ReasonName(finished.front().reason) : "none"; }
};

class RecordingSink final : public RequestSink {
 public:
  RecordingSink(std::string id, std::shared_ptr<Output> output, EventLog& log)
      : id_(std::move(id)), output_(std::move(output)), log_(log) {}

  bool Ready() const override { return output_->ready; }

  void OnDelta(Delta delta) override {
    EXPECT_FALSE(output_->ended()) << id_ << ": output after its end";
    std::string line;
    if (!delta.tokens.empty()) {
      absl::StrAppend(&line, " tokens ", absl::StrJoin(delta.tokens, " "));
    }
    if (!delta.text.empty()) absl::StrAppend(&line, " '", delta.text, "'");
    for (const EvictionTrace& round : delta.evictions) {
      for (const EvictionTrace::Victims& victims : round.victims) {
        absl::StrAppend(&line, " at ", round.at_token, " evicted ",
                        absl::StrJoin(victims.index, " "));
      }
    }
    if (delta.completion != 0) absl::StrAppend(&line, " of ", delta.completion);
    if (delta.ended.has_value()) {
      absl::StrAppend(&line, " ended: ", ReasonName(delta.ended->reason));
    }
    if (delta.progress.has_value()) {
      absl::StrAppend(&line, " ", delta.progress->done, " of ", delta.progress->total);
    }
    if (!delta.prompt.tokens.empty()) {
      absl::StrAppend(&line, " prompt ", delta.prompt.first, "+", delta.prompt.tokens.size());
      output_->prompt.push_back(delta.prompt);
    }
    log_.Add(id_, ">", line);
    output_->text += delta.text;
    auto append = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
    append(output_->tokens, delta.tokens);
    append(output_->logprobs, delta.logprobs);
    append(output_->greedy, delta.greedy);
    append(output_->top_logprobs, delta.top_logprobs);
    append(output_->residual_steps, delta.residual_steps);
    append(output_->evictions, delta.evictions);
  }

  void OnFinished(Finished finished) override {
    EXPECT_FALSE(output_->ended()) << id_ << ": ended twice";
    log_.Add(id_, "> ", ReasonName(finished.reason),
             finished.status.ok() ? "" : absl::StrCat(": ", finished.status.ToString()));
    output_->finished.push_back(std::move(finished));
  }

 private:
  const std::string id_;
  const std::shared_ptr<Output> output_;
  EventLog& log_;
};

class RecordingObserver final : public EngineObserver {
 public:
  explicit RecordingObserver(EventLog& log) : log_(log) {}

  void OnAdmitted(const Request& request, absl::Duration queued, int64_t cached) override {
    log_.Add("admitted ", request.id);
    admitted.push_back(request.id);
  }
  void OnStep(const StepStats& step) override {
    if (step.sequences > 0) {
      log_.Add("step of ", step.sequences, ": prefill ", step.prefill_tokens, ", decode ",
               step.decode_tokens);
    }
    steps.push_back(step);
  }
  void OnFirstToken(const Request& request, absl::Duration since_arrival) override {
    log_.Add("first token ", request.id);
  }
  void OnEvicted(const EvictedStats& evicted) override {
    log_.Add("evicted ", evicted.request.id, " ", evicted.entries,
             evicted.in_prefill ? " in prefill" : "");
  }
  void OnFinished(const Request& request, const Finished& finished) override {
    ++finished_count[request.id];
    if (on_finished) on_finished(request);
  }

  std::function<void(const Request&)> on_finished;

  std::vector<std::string> admitted;
  std::vector<StepStats> steps;
  std::map<std::string, int> finished_count;

 private:
  EventLog& log_;
};

// One sequence's share of a forward, as the executor saw it.
struct SeenItem {
  std::string id;
  std::vector<int32_t> tokens, forced, outputs;
  int64_t first = 0, num_outputs = 0, draw = 0;
  bool decode = false, ends_prefill = false, evicts_prefill = false;
};

struct RigOptions {
  int64_t kv_tokens = 4096;  // under `full`
  EngineOptions engine;
};

// An engine over a fake executor, stepped by hand.
class EngineTest : public testing::Test {
 protected:
  EngineTest() { Build({}); }
  ~EngineTest() override {
    engine_.reset();
    for (const auto& [id, count] : observer_.finished_count) {
      EXPECT_EQ(count, 1) << id << ": the observer heard of its end " << count << " times";
    }
    for (const auto& [id, output] : outputs_) {
      EXPECT_THAT(output->finished, SizeIs(1)) << id;
      EXPECT_EQ(observer_.finished_count[id], 1) << id;
    }
    EXPECT_EQ(script_->open_sequences, 0);
    EXPECT_EQ(script_->used_bytes, 0);
  }

  void Build(RigOptions options) {
    options.engine.kv_capacity_bytes = options.kv_tokens * kTokenBytes;
    admission_ = std::make_unique<Admission>(
        FakeManifest(), EveryKindOfPolicy(),
        AdmissionLimits{.kv_capacity_bytes = options.engine.kv_capacity_bytes,
                        .prefill_chunk_tokens = options.engine.scheduler.prefill_chunk_tokens});
    engine_ = std::make_unique<Engine>(options.engine,
                                       std::make_unique<FakeExecutor>(script_, kTokenBytes),
                                       *tokenizer_, observer_, [this] { return now_; });
  }

  // Under `full`, to begin with; the prompt is 0, 1, 2 ... and the tokens count on from there.
  RequestOptions Ask(const std::string& id, int64_t prompt_tokens, int64_t max_output) const {
    RequestOptions options{.id = id};
    for (int64_t i = 0; i < prompt_tokens; ++i) options.prompt.push_back(i % kFakeVocab);
    options.stop.max_output_tokens = max_output;
    options.arrival = now_;
    return options;
  }
  RequestOptions Ask(const std::string& id, int64_t prompt_tokens, int64_t max_output,
                     const std::string& policy, int64_t budget) const {
    RequestOptions options = Ask(id, prompt_tokens, max_output);
    options.kv = {.policy = policy, .budget = budget};
    return options;
  }

  std::shared_ptr<Output> Submit(RequestOptions options) {
    std::string id = options.id;
    auto resolved = admission_->Resolve(std::move(options));
    if (const auto* rejection = std::get_if<Rejection>(&resolved)) {
      ADD_FAILURE() << id << ": " << rejection->message;
      return std::make_shared<Output>();
    }
    auto output = std::make_shared<Output>();
    outputs_[id] = output;
    engine_->Submit(std::get<Request>(std::move(resolved)),
                    std::make_shared<RecordingSink>(id, output, log_));
    return output;
  }

  std::shared_ptr<Output> Idle(RequestOptions options) {
    auto output = std::make_shared<Output>();
    engine_->SubmitIdle(std::get<Request>(admission_->Resolve(std::move(options))),
                        std::make_shared<RecordingSink>("", output, log_));
    return output;
  }

  // One step's events.
  std::string Step() {
    log_.Take();
    engine_->Step();
    return log_.Take();
  }
  void RunAll() {
    for (int steps = 0; engine_->Step(); ++steps) ASSERT_LT(steps, 100000);
  }
  void ExpectNothingHeld() const {
    EXPECT_EQ(engine_->ledger().reserved(), 0);
    EXPECT_EQ(script_->open_sequences, 0);
    EXPECT_EQ(script_->used_bytes, 0);
  }

  // From now on, of items that succeed or not.
  void RecordItems() {
    script_->on_item = [this](const WorkItem& item) {
      seen_.push_back({.id = item.request->id,
                       .tokens = {item.tokens.begin(), item.tokens.end()},
                       .forced = {item.forced.begin(), item.forced.end()},
                       .outputs = {item.outputs.begin(), item.outputs.end()},
                       .first = item.first,
                       .num_outputs = item.num_outputs,
                       .draw = item.draw,
                       .decode = item.decode,
                       .ends_prefill = item.ends_prefill,
                       .evicts_prefill = item.evicts_prefill});
      return absl::OkStatus();
    };
  }

  absl::Time now_ = absl::FromUnixSeconds(1000);
  EventLog log_;
  RecordingObserver observer_{log_};
  const std::unique_ptr<Tokenizer> tokenizer_ = *Tokenizer::FromJson(FakeTokenizerJson());
  const std::shared_ptr<FakeScript> script_ = std::make_shared<FakeScript>();
  std::vector<SeenItem> seen_;
  std::map<std::string, std::shared_ptr<Output>> outputs_;
  std::unique_ptr<Admission> admission_;
  std::unique_ptr<Engine> engine_;
};

absl::Status Boom() { return absl::InternalError("boom"); }

bool HasRequest(absl::Span<const WorkItem> items, const std::string& id) {
  return std::any_of(items.begin(), items.end(),
                     [&](const WorkItem& item) { return item.request->id == id; });
}

// The life of a request.

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
  EXPECT_EQ(finished.kv.peak_entries, 20 * kLanes);
  EXPECT_EQ(finished.kv.rounds, 14);
  EXPECT_EQ(finished.kv.evicted_entries, (10 + 13) * kLanes);
  EXPECT_EQ(finished.kv.final_entries, 11 * kLanes);
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

// Failures.

TEST_F(EngineTest, FailedForwardIsRepeatedAloneAndOnlyTheGuiltyFails) {
  const auto a = Submit(Ask("a", 5, 6));
  const auto b = Submit(Ask("b", 10, 6));
  const auto c = Submit(Ask("c", 20, 6));
  std::vector<size_t> sizes;
  int b_runs = 0;
  script_->on_forward = [&](absl::Span<const WorkItem> items) {
    sizes.push_back(items.size());
    if (!HasRequest(items, "b")) return absl::OkStatus();
    return ++b_runs >= 3 ? Boom() : absl::OkStatus();
  };
  engine_->Step();
  engine_->Step();
  sizes.clear();
  EXPECT_EQ(Step(),
            "a> tokens 7 ' w7'\n"
            "b> error: INTERNAL: the forward failed: boom\n"
            "c> tokens 22 ' w22'\n"
            "step of 3: prefill 0, decode 2\n");
  EXPECT_THAT(sizes, ElementsAre(3, 1, 1, 1));
  EXPECT_EQ(script_->open_sequences, 2) << "b's KV is free within the step";
  RunAll();
  EXPECT_THAT(a->tokens, ElementsAre(5, 6, 7, 8, 9, 10));
  EXPECT_THAT(b->tokens, ElementsAre(10, 11));
  EXPECT_THAT(c->tokens, ElementsAre(20, 21, 22, 23, 24, 25));
  EXPECT_EQ(b->finished.at(0).output_tokens, 2);
  ExpectNothingHeld();
}

TEST_F(EngineTest, ForwardThatFailsOnceHarmsNobody) {
  RecordItems();
  const auto a = Submit(Ask("a", 5, 6));
  const auto b = Submit(Ask("b", 10, 6));
  int forwards = 0;
  script_->on_forward = [&](absl::Span<const WorkItem>) {
    return ++forwards == 3 ? Boom() : absl::OkStatus();
  };
  RunAll();
  EXPECT_THAT(a->tokens, ElementsAre(5, 6, 7, 8, 9, 10));
  EXPECT_THAT(b->tokens, ElementsAre(10, 11, 12, 13, 14, 15));
  // Nothing of the failed step counted: each index was cached once.
  std::map<std::string, int64_t> next;
  for (const SeenItem& item : seen_) {
    EXPECT_EQ(item.first, next[item.id]) << item.id;
    next[item.id] += item.tokens.size();
  }
}

TEST_F(EngineTest, OneAloneIsNotRepeated) {
  Submit(Ask("a", 5, 6));
  int forwards = 0;
  script_->on_forward = [&](absl::Span<const WorkItem>) {
    ++forwards;
    return Boom();
  };
  EXPECT_THAT(Step(), HasSubstr("a> error: INTERNAL: the forward failed: boom"));
  EXPECT_EQ(forwards, 1);
  ExpectNothingHeld();
}

TEST_F(EngineTest, FailedItemEndsAlone) {
  const auto a = Submit(Ask("a", 5, 3));
  Submit(Ask("b", 10, 3));
  script_->on_item = [](const WorkItem& item) {
    return item.request->id == "b" && item.decode ? Boom() : absl::OkStatus();
  };
  engine_->Step();
  EXPECT_EQ(Step(),
            "a> tokens 6 ' w6'\n"
            "b> error: INTERNAL: boom\n"
            "step of 2: prefill 0, decode 1\n");
  EXPECT_EQ(script_->open_sequences, 1);
  RunAll();
  EXPECT_EQ(a->reason(), "length");
}

// Nothing has been done where all of them throw together: each is settled alone.
TEST_F(EngineTest, WhatThrowsWhileItSettlesEndsAlone) {
  const auto a = Submit(Ask("a", 5, 10, "by_chunk", 8));
  const auto b = Submit(Ask("b", 5, 10, "by_chunk", 8));
  script_->on_settle = [](const WorkItem& item) {
    if (item.request->id == "b" && item.decode) throw std::bad_alloc();
    return absl::OkStatus();
  };
  RunAll();
  EXPECT_EQ(a->reason(), "length");
  EXPECT_EQ(b->finished.front().status.code(), absl::StatusCode::kInternal);
  ExpectNothingHeld();
}

TEST_F(EngineTest, FailedPolicyEndsItsRequestAlone) {
  const auto a = Submit(Ask("a", 5, 10, "by_chunk", 8));
  Submit(Ask("b", 5, 10, "by_chunk", 8));
  script_->on_settle = [](const WorkItem& item) {
    return item.request->id == "b" && item.decode ? WithReason(Boom(), kPolicyFailed)
                                                  : absl::OkStatus();
  };
  engine_->Step();
  EXPECT_EQ(Step(),
            "a> tokens 6 ' w6'\n"
            "b> tokens 6 ' w6'\n"
            "b> error: INTERNAL: boom [epikv/reason='POLICY_FAILED']\n"
            "step of 2: prefill 0, decode 2\n");
  EXPECT_EQ(script_->open_sequences, 1);
  RunAll();
  EXPECT_EQ(a->reason(), "length");
  ExpectNothingHeld();
}

TEST_F(EngineTest, FailedOpenLetsTheNextInAtOnce) {
  Build({.kv_tokens = 20});
  script_->on_open = [](const Request& request) {
    return request.id == "a" ? Boom() : absl::OkStatus();
  };
  Submit(Ask("a", 10, 11));
  Submit(Ask("b", 10, 11));
  EXPECT_EQ(Step(),
            "a> error: INTERNAL: boom\n"
            "admitted b\n"
            "first token b\n"
            "b> tokens 10 'w10'\n"
            "step of 1: prefill 10, decode 0\n");
}

// Otherwise Step would say that nothing can run, and nobody would call it again.
TEST_F(EngineTest, FailedOpenDoesNotCountAsRunning) {
  Build({.engine = {.max_running_requests = 1}});
  script_->on_open = [](const Request& request) {
    return request.id == "b" ? absl::OkStatus() : Boom();
  };
  Submit(Ask("a", 10, 1));
  Submit(Ask("b", 10, 1));
  EXPECT_TRUE(engine_->Step());
  EXPECT_EQ(outputs_["b"]->reason(), "length");
}

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

// Cancelling.

TEST_F(EngineTest, CancelFreesKvInEveryState) {
  Build({.engine = {.scheduler = {.prefill_chunk_tokens = 8}, .max_running_requests = 1}});
  const absl::Status gone = absl::CancelledError("the client has gone");
  struct State {
    const char* name;
    int steps;
  };
  for (const State& state :
       {State{"queued", 0}, State{"prefilling", 1}, State{"prefilled", 3}, State{"decoding", 5}}) {
    SCOPED_TRACE(state.name);
    const std::string id = absl::StrCat("a-", state.name);
    auto output = Submit(Ask(id, 20, 10));
    for (int i = 0; i < state.steps; ++i) engine_->Step();
    EXPECT_EQ(script_->open_sequences, state.steps > 0);
    log_.Take();
    EXPECT_TRUE(engine_->Cancel(id, gone));
    EXPECT_EQ(log_.Take(), id + "> cancelled: CANCELLED: the client has gone\n");
    ExpectNothingHeld();
    EXPECT_EQ(engine_->running() + engine_->waiting(), 0);
    EXPECT_FALSE(engine_->Cancel(id, gone));
    EXPECT_FALSE(engine_->Step());
  }
}

TEST_F(EngineTest, CancelEndsAPausedRequest) {
  auto output = Submit(Ask("a", 20, 10));
  engine_->Step();
  output->ready = false;
  EXPECT_FALSE(engine_->Step());
  EXPECT_TRUE(engine_->Cancel("a", absl::CancelledError("slow")));
  ExpectNothingHeld();
}

// Else one that pauses would keep the others out: the pool starts anew once nothing holds it.
TEST_F(EngineTest, LostPoolEndsAPausedRequestAndServesTheNext) {
  Submit(Ask("a", 20, 10));
  Submit(Ask("b", 20, 10));
  engine_->Step();
  outputs_["a"]->ready = false;
  script_->lost = true;
  Submit(Ask("c", 20, 10));
  EXPECT_TRUE(engine_->Step());
  for (const char* id : {"a", "b"}) {
    EXPECT_EQ(outputs_[id]->finished.front().status.code(), absl::StatusCode::kInternal);
  }
  RunAll();
  EXPECT_EQ(outputs_["c"]->reason(), "length");
  ExpectNothingHeld();
}

TEST_F(EngineTest, CancelOfAQueuedRequestKeepsTheOrder) {
  Build({.engine = {.max_running_requests = 1}});
  for (const char* id : {"a", "b", "c", "d"}) Submit(Ask(id, 5, 2));
  engine_->Step();
  EXPECT_TRUE(engine_->Cancel("c", absl::CancelledError("")));
  RunAll();
  EXPECT_THAT(observer_.admitted, ElementsAre("a", "b", "d"));
}

TEST_F(EngineTest, CancelOfNobodyIsFalse) {
  Submit(Ask("a", 5, 1));
  EXPECT_FALSE(engine_->Cancel("b", absl::CancelledError("")));
  RunAll();
  EXPECT_FALSE(engine_->Cancel("a", absl::CancelledError("")));
}

TEST_F(EngineTest, CancelAllEndsQueuedAndRunning) {
  Build({.engine = {.max_running_requests = 1}});
  const auto a = Submit(Ask("a", 5, 10));
  const auto b = Submit(Ask("b", 5, 10));
  engine_->Step();
  engine_->CancelAll(absl::UnavailableError("shutting down"));
  for (const auto& output : {a, b}) {
    ASSERT_EQ(output->reason(), "cancelled");
    EXPECT_EQ(output->finished.at(0).status, absl::UnavailableError("shutting down"));
  }
  ExpectNothingHeld();
}

TEST_F(EngineTest, DestructorEndsWhatIsLive) {
  Build({.engine = {.max_running_requests = 1}});
  const auto a = Submit(Ask("a", 5, 10));
  const auto b = Submit(Ask("b", 5, 10));
  engine_->Step();
  engine_.reset();
  EXPECT_EQ(a->reason(), "cancelled");
  EXPECT_EQ(b->reason(), "cancelled");
}

TEST_F(EngineTest, IdIsFreeAfterTheEnd) {
  Submit(Ask("a", 5, 10));
  engine_->Step();
  engine_->Cancel("a", absl::CancelledError(""));
  observer_.finished_count.clear();
  const auto again = Submit(Ask("a", 5, 2));
  RunAll();
  EXPECT_EQ(again->reason(), "length");
}

// Pausing.

TEST_F(EngineTest, PausedRequestsAreLeftOutAndGoOn) {
  const auto a = Submit(Ask("a", 5, 4));
  Submit(Ask("b", 10, 4));
  engine_->Step();
  a->ready = false;
  EXPECT_EQ(Step(),
            "b> tokens 11 ' w11'\n"
            "step of 1: prefill 0, decode 1\n");
  RunAll();
  EXPECT_EQ(outputs_["b"]->reason(), "length");
  EXPECT_FALSE(a->ended());
  EXPECT_FALSE(engine_->Step());
  a->ready = true;
  RunAll();
  EXPECT_THAT(a->tokens, ElementsAre(5, 6, 7, 8));
}

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
    RequestOptions options =
        Ask(id, Draw(1, OneIn(4) ? 300 : 40), Draw(1, 40), policies[Draw(0, 3)], Draw(1, 120));
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

}  // namespace
}  // namespace epikv
