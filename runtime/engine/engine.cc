#include "runtime/engine/engine.h"

#include <time.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "runtime/constraints/constraint.h"
#include "runtime/base/reason.h"
#include "runtime/text/text_stream.h"

namespace epikv {
namespace {

// Steps to come may take longer than those before.
constexpr double kMargin = 1.25;

absl::Time EarlierOf(absl::Time a, absl::Time b) { return a < b ? a : b; }

// Runs what a request's end can do without: if it throws, for lack of memory, it is left out.
template <class Work>
void Quietly(Work work) {
  try {
    work();
  } catch (const std::exception&) {
  }
}

absl::Duration ThreadCpu() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return absl::DurationFromTimespec(now);
}

// Charges wall and CPU time to one stage after another.
class StageClock {
 public:
  explicit StageClock(StepStats& step) : step_(step) {}
  void Charge(Stage stage) {
    const absl::Time wall = absl::Now();
    const absl::Duration cpu = ThreadCpu();
    step_.wall[static_cast<int>(stage)] += wall - wall_;
    step_.cpu[static_cast<int>(stage)] += cpu - cpu_;
    wall_ = wall;
    cpu_ = cpu;
  }
  void ChargeTotal() {
    step_.total_wall = wall_ - start_wall_;
    step_.total_cpu = cpu_ - start_cpu_;
  }

 private:
  StepStats& step_;
  absl::Time wall_ = absl::Now();
  absl::Duration cpu_ = ThreadCpu();
  const absl::Time start_wall_ = wall_;
  const absl::Duration start_cpu_ = cpu_;
};

}  // namespace

// A request in the engine. Its tokens are the prompt, then what was sampled (or forced).
struct Sequence {
  Sequence(SequenceId id, Request r, std::shared_ptr<RequestSink> s, const Tokenizer& tokenizer)
      : id(id),
        request(std::move(r)),
        sink(std::move(s)),
        tokens(request.prompt),
        ends(EndsOf(request)),
        text(tokenizer, {.stop_strings = request.stop_strings,
                         .stop_token_ids = ends,
                         .include_stop = request.include_stop,
                         .min_tokens = request.min_output_tokens}) {
    if (request.sampling.constraint != nullptr && !scores()) {
      constraint.emplace(request.sampling.constraint, ends);
    }
    // Work items point into the tokens while more are added.
    tokens.reserve(request.prompt.size() + request.max_output_tokens);
    if (request.force_in_chunks) {
      tokens.insert(tokens.end(), request.forced.begin(), request.forced.end() - 1);
    }
  }

  static std::vector<int32_t> EndsOf(const Request& request) {
    std::vector<int32_t> tokens = request.stop_tokens;
    tokens.insert(tokens.end(), request.end_tokens.begin(), request.end_tokens.end());
    return tokens;
  }
  bool scores() const { return !request.forced.empty(); }

  const SequenceId id;
  const Request request;
  const std::shared_ptr<RequestSink> sink;
  std::vector<int32_t> tokens;  // known so far; [0, cached) are in the cache
  int64_t cached = 0;
  int64_t from_prefix = 0;  // of those cached, copied from the prefix cache
  int64_t num_outputs = 0;
  const std::vector<int32_t> ends;  // tokens that end the output
  TextStream text;
  std::optional<ConstraintState> constraint;
  std::optional<StopMatch> stop;
  bool open = false;  // holds KV
  bool finished = false;
  int64_t rounds = 0, evicted_entries = 0, trace_victims = 0;
  bool trace_truncated = false;
  absl::Time admitted, first_token, last_token;
  absl::Duration eviction_time;

  int64_t completion = 0;
  std::shared_ptr<Family> family;  // of several completions; null: it is the only one
  // It has ended, before its family parted.
  std::optional<FinishReason> ended_early;

  // That it stands for: all, until they part.
  int64_t completions() const;
};

// The completions of one request. The first caches the prompt; then each has KV of its own.
struct Family {
  explicit Family(const Request& r) : request(r), live(r.completions()) {}

  const Request request;
  int64_t live;  // completions that have not ended
  bool parted = false;
  std::vector<std::unique_ptr<Sequence>> siblings;  // until then, once they have begun
  // What the prompt took, the same for all completions.
  CacheFacts prompt_kv;
  int64_t prompt_rounds = 0, prompt_evicted = 0;
  Finished total;                            // of those that have ended
  int64_t held_entries = 0, held_bytes = 0;  // their peaks since they parted

  // closed: by Engine::Close.
  void Add(const Sequence& s, const Finished& closed) {
    total.prompt_tokens = closed.prompt_tokens;
    total.cached_prompt_tokens = closed.cached_prompt_tokens;
    total.output_tokens += closed.output_tokens;
    total.kv_trace_truncated |= closed.kv_trace_truncated;
    total.kv.final_entries += s.open ? closed.kv.final_entries : 0;
    total.kv.evicted_entries += closed.kv.evicted_entries - (parted ? prompt_evicted : 0);
    total.kv.rounds += closed.kv.rounds - (parted ? prompt_rounds : 0);
    total.timings.queue = closed.timings.queue;
    total.timings.prefill = closed.timings.prefill;
    total.timings.time_to_first_token = closed.timings.time_to_first_token;
    total.timings.decode = std::max(total.timings.decode, closed.timings.decode);
    total.timings.eviction += closed.timings.eviction;
    if (s.completion != 0) return;
    total.reason = closed.reason;
    total.stop_string = closed.stop_string;
    total.stop_token = closed.stop_token;
    total.kv.kept = closed.kv.kept;
  }
};

int64_t Sequence::completions() const {
  return family != nullptr && !family->parted ? family->live : 1;
}

Engine::Engine(EngineOptions options, std::unique_ptr<StepExecutor> executor,
               const Tokenizer& tokenizer, EngineObserver& observer,
               std::function<absl::Time()> now)
    : options_(std::move(options)),
      executor_(std::move(executor)),
      tokenizer_(tokenizer),
      observer_(observer),
      now_(std::move(now)),
      ledger_(options_.kv_capacity_bytes),
      queue_(options_.queue),
      outlook_(LookOut()) {}

Engine::~Engine() { CancelAll(absl::CancelledError("the engine has ended")); }

void Engine::Submit(Request request, std::shared_ptr<RequestSink> sink) {
  EndIdle(absl::CancelledError("it gave way to a live request"));
  const SequenceId id{next_id_++};
  auto sequence = std::make_unique<Sequence>(id, std::move(request), std::move(sink), tokenizer_);
  const Request& queued = sequence->request;
  waiting_.emplace(id, std::move(sequence));
  try {
    queue_.Push(id, queued, now_());
  } catch (...) {
    waiting_.erase(id);
    throw;
  }
}

void Engine::SubmitIdle(Request request, std::shared_ptr<RequestSink> sink) {
  const int64_t bytes = request.demand.peak_bytes();
  const bool alone = running_.empty() && waiting_.empty() && idle_ == nullptr;
  auto refuse = [&sink](absl::Status why) {
    sink->OnFinished({.reason = FinishReason::kCancelled, .status = std::move(why)});
  };
  if (!alone) return refuse(absl::CancelledError("something else runs"));
  if (ledger_.reserved() + executor_->prefix_bytes() + bytes > ledger_.capacity()) {
    return refuse(absl::ResourceExhaustedError("the KV pool has no room for it"));
  }
  idle_ = std::make_unique<Sequence>(SequenceId{next_id_++}, std::move(request), std::move(sink),
                                     tokenizer_);
  ledger_.Reserve(idle_->id, bytes);
  idle_->open = true;
  idle_->admitted = now_();
  const absl::StatusOr<int64_t> cached =
      executor_->Open(idle_->id, idle_->request, executor_->prefix_bytes());
  if (!cached.ok()) return EndIdle(cached.status());
  idle_->cached = idle_->from_prefix = *cached;
}

void Engine::EndIdle(absl::Status status) {
  if (idle_ == nullptr) return;
  Finish(*idle_, FinishReason::kCancelled, std::move(status));
  idle_.reset();
}

EngineObserver& Engine::ObserverOf(const Sequence& s) {
  return &s == idle_.get() ? nobody_ : observer_;
}

int64_t Engine::running() const {
  int64_t places = 0;
  for (const SequencePtr& s : running_) places += s->completions();
  return places;
}

bool Engine::Cancel(const std::string& request_id, absl::Status status) {
  auto end = [&](Sequence& s) {
    if (s.finished || s.request.id != request_id) return false;
    Finish(s, FinishReason::kCancelled, std::move(status));
    return true;
  };
  const bool found =
      std::any_of(waiting_.begin(), waiting_.end(), [&](auto& w) { return end(*w.second); }) ||
      std::any_of(running_.begin(), running_.end(), [&](auto& s) { return end(*s); });
  DropFinished();
  return found;
}

void Engine::CancelAll(absl::Status status) {
  EndIdle(status);
  for (auto& [id, s] : waiting_) Finish(*s, FinishReason::kCancelled, status);
  for (SequencePtr& s : running_) Finish(*s, FinishReason::kCancelled, status);
  DropFinished();
}

absl::Time Engine::NextDeadline() const {
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [id, s] : waiting_) next = EarlierOf(next, s->request.deadline);
  for (const SequencePtr& s : running_) next = EarlierOf(next, s->request.deadline);
  return next;
}

RequestFacts Engine::FactsOf(const Sequence& s) const {
  const Request& request = s.request;
  return {.id = request.id,
          .completion = s.completion,
          .state = !s.open                               ? RequestState::kQueued
                   : s.cached < request.prefill_tokens() ? RequestState::kPrefill
                                                         : RequestState::kDecode,
          .policy = std::string(request.spec->name),
          .budget = request.budget,
          .prompt_tokens = static_cast<int64_t>(request.prompt.size()),
          .cached_tokens = s.cached,
          .output_tokens = s.num_outputs,
          .max_output_tokens = request.max_output_tokens,
          .kv_used_bytes = s.open ? executor_->Facts(s.id).bytes : 0,
          .kv_reserved_bytes = s.open ? ledger_.held(s.id) : request.demand.peak_bytes(),
          .arrival = request.arrival,
          .deadline = request.deadline};
}

std::vector<RequestFacts> Engine::Describe() {
  std::vector<RequestFacts> all;
  for (const SequencePtr& s : running_) {
    all.push_back(FactsOf(*s));
    if (!s->sink->Ready()) all.back().waits_for = WaitsFor::kReader;
  }
  const std::optional<SequenceId> head = queue_.Head(now_());
  for (const auto& [id, s] : waiting_) {
    all.push_back(FactsOf(*s));
    all.back().waits_for = id != head ? WaitsFor::kTurn
                           : running() + s->request.completions() <= options_.max_running_requests
                               ? WaitsFor::kKv
                               : WaitsFor::kPlace;
  }
  return all;
}

bool Engine::Step(absl::Duration waited) {
  StepStats step;
  StageClock clock(step);
  const absl::Time begin = now_();
  ExpireDeadlines();
  Admit();
  std::vector<Sequence*> sequences;
  const std::vector<WorkItem> items = PlanStep(running_, sequences);
  clock.Charge(Stage::kSchedule);
  if (items.empty()) {
    const bool idled = idles() && StepIdle();
    Report(StepStats());  // what ended without a step shows
    return idled;
  }

  std::vector<ForwardOutcome> outcomes = RunForward(items);
  clock.Charge(Stage::kForward);

  for (size_t i = 0; i < items.size(); ++i) {
    if (outcomes[i].status.ok()) {
      (items[i].decode ? step.decode_tokens : step.prefill_tokens) += items[i].tokens.size();
    }
    if (sequences[i]->finished) continue;  // with another of its completions
    Guard(*sequences[i], [&] { Deliver(*sequences[i], items[i], std::move(outcomes[i])); });
  }
  clock.Charge(Stage::kDeliver);

  Settle(items, sequences);
  clock.Charge(Stage::kEvict);
  executor_->AddStageTimes(step);

  DropFinished();
  pace_.OnStep(waited + (now_() - begin), step.prefill_tokens, step.decode_tokens);
  step.sequences = static_cast<int64_t>(items.size());
  clock.ChargeTotal();
  Report(step);
  return true;
}

// As a step, but that forecasts learn nothing and observers hear nothing of it. False: its reader
// is not ready.
bool Engine::StepIdle() {
  std::vector<Sequence*> sequences;
  const std::vector<WorkItem> items = PlanStep({&idle_, 1}, sequences);
  if (items.empty()) return false;
  std::vector<ForwardOutcome> outcomes = RunForward(items);
  for (size_t i = 0; i < items.size(); ++i) {
    Guard(*idle_, [&] { Deliver(*idle_, items[i], std::move(outcomes[i])); });
  }
  Settle(items, sequences);
  if (idle_->finished) idle_.reset();
  return true;
}

Outlook Engine::LookOut() const {
  const int64_t idle_bytes = idles() ? ledger_.held(idle_->id) : 0;  // free for whoever comes
  Outlook outlook{
      .at = now_(),
      .measured = pace_.measured(),
      .best = pace_.best(),
      .present = pace_.present(),
      .room = {.places = static_cast<double>(options_.max_running_requests),
               .free_places = static_cast<double>(options_.max_running_requests - running()),
               .bytes = static_cast<double>(ledger_.capacity()),
               .free_bytes =
                   static_cast<double>(ledger_.capacity() - ledger_.reserved() + idle_bytes)},
      .waiting = queue_.backlog(),
      .ageing = options_.queue.ageing,
      .quantum_tokens = static_cast<double>(options_.queue.quantum_tokens)};
  for (const SequencePtr& s : running_) {
    outlook.running_best +=
        WorkLeft(s->request, s->cached, s->num_outputs, outlook.best, s->completions());
    outlook.running_present +=
        WorkLeft(s->request, s->cached, s->num_outputs, outlook.present, s->completions());
  }
  return outlook;
}

void Engine::Report(StepStats step) {
  outlook_ = LookOut();
  step.running = running();
  step.waiting = waiting();
  auto index = [](const Sequence& s) { return static_cast<int>(s.request.scheduling.priority); };
  for (const SequencePtr& s : running_) step.running_by_priority[index(*s)] += s->completions();
  for (const auto& [id, s] : waiting_) ++step.waiting_by_priority[index(*s)];
  step.predicted_wait = PredictWaitBehindAll(outlook_);
  step.kv_used_bytes = executor_->used_bytes();
  step.kv_reserved_bytes = ledger_.reserved();
  step.kv_capacity_bytes = ledger_.capacity();
  step.kv_prefix_bytes = executor_->prefix_bytes();
  executor_->AddMoves(step);
  observer_.OnStep(step);
}

void Engine::ExpireDeadlines() {
  const absl::Time now = now_();
  auto passed = [](absl::string_view where) {
    return absl::DeadlineExceededError(absl::StrCat("the deadline passed ", where));
  };
  const Pace best = pace_.best();
  for (auto& [id, s] : waiting_) {
    Guard(*s, [&, &s = *s] {
      if (s.request.deadline <= now) {
        return Finish(s, FinishReason::kDeadline, passed("in the queue"));
      }
      absl::Status late = Infeasible(s.request, PredictLeastRun(s.request, best), now);
      if (!late.ok()) Finish(s, FinishReason::kDeadline, std::move(late));
    });
  }
  for (SequencePtr& s : running_) {
    if (s->request.deadline > now) continue;
    Guard(*s, [&] { Finish(*s, FinishReason::kDeadline, passed("while running")); });
  }
  DropFinished();
}

absl::Status Engine::Infeasible(const Request& request, absl::Duration run, absl::Time now) const {
  const absl::Duration left = request.deadline - now;
  if (!options_.refuse_infeasible_deadlines || !pace_.measured() || run <= left) {
    return absl::OkStatus();
  }
  auto seconds = [](absl::Duration d) {
    return absl::StrFormat("%.3f s", absl::ToDoubleSeconds(d));
  };
  return WithReason(absl::DeadlineExceededError(
                        absl::StrCat("the deadline cannot be met: it is in ", seconds(left),
                                     ", and the request would run for ", seconds(run))),
                    kDeadlineInfeasible);
}

void Engine::EndLost() {
  if (!executor_->lost()) return;
  const absl::Status lost = absl::InternalError("rows of the KV pool were lost in a failed move");
  for (SequencePtr& s : running_) Finish(*s, FinishReason::kError, lost);
  DropFinished();
}

// The head is admitted if and only if there is a place and reserved + its own <= pool.
//
// While requests of late ran past their deadlines, the head is dropped instead if at the present
// pace it would do so, too: it would slow the others, and in a queue that is always full each place
// would go to one whose time is just too short.
void Engine::Admit() {
  EndLost();
  while (running() < options_.max_running_requests) {
    const absl::Time now = now_();
    const std::optional<SequenceId> head = queue_.Head(now);
    if (!head.has_value()) break;
    SequencePtr& waiting = waiting_.at(*head);
    if (running() + waiting->request.completions() > options_.max_running_requests) break;
    const int64_t bytes = waiting->request.demand.peak_bytes();
    if (!ledger_.Fits(bytes)) break;
    absl::Status late = absl::OkStatus();
    if (pace_.missing() && running() + queue_.size() > 1) {
      late = Infeasible(waiting->request, PredictRun(waiting->request, pace_.present()) * kMargin,
                        now);
    }
    if (!late.ok()) {
      Finish(*waiting, FinishReason::kDeadline, std::move(late));
      queue_.Remove(*head);
      waiting_.erase(*head);
      continue;
    }
    running_.reserve(running_.size() + 1);
    queue_.PopHead();
    running_.push_back(std::move(waiting));
    waiting_.erase(*head);
    Sequence& s = *running_.back();
    s.admitted = now;
    Guard(s, [&] { Open(s, bytes); });
    if (!s.finished) continue;
    running_.pop_back();  // the next may have its place
    EndLost();
  }
}

void Engine::Open(Sequence& s, int64_t bytes) {
  if (s.request.completions() > 1) s.family = std::make_shared<Family>(s.request);
  ledger_.Reserve(s.id, bytes);
  s.open = true;
  const int64_t prefix_bytes =
      std::min(options_.max_prefix_bytes, ledger_.capacity() - ledger_.reserved());
  absl::StatusOr<int64_t> cached = executor_->Open(s.id, s.request, prefix_bytes);
  if (!cached.ok()) return Finish(s, FinishReason::kError, std::move(cached).status());
  s.cached = s.from_prefix = *cached;
  pace_.OnPrompt(s.request.prefill_tokens() - s.cached, s.request.prefill_tokens());
  observer_.OnAdmitted(s.request, s.admitted - s.request.arrival, s.from_prefix);
}

std::vector<WorkItem> Engine::PlanStep(absl::Span<const SequencePtr> running,
                                       std::vector<Sequence*>& sequences) {
  std::vector<SequenceView> views;
  views.reserve(running.size());
  for (const SequencePtr& s : running) {
    views.push_back({.prefill_tokens = s->request.prefill_tokens(),
                     .cached_tokens = s->cached,
                     .ready = s->sink->Ready()});
  }
  std::vector<WorkItem> items;
  const int64_t chunk = options_.scheduler.prefill_chunk_tokens;
  for (const PlannedItem& planned : Plan(views, options_.scheduler)) {
    Sequence& s = *running[planned.sequence];
    const int64_t prompt = static_cast<int64_t>(s.request.prompt.size());
    const int64_t prefill = s.request.prefill_tokens();
    const int64_t end = s.cached + planned.num_tokens;
    WorkItem item{.id = s.id,
                  .request = &s.request,
                  .tokens = absl::MakeConstSpan(s.tokens).subspan(s.cached, planned.num_tokens),
                  .first = s.cached,
                  .decode = s.cached >= prefill,
                  .draw = s.num_outputs};
    item.ends_prefill = !item.decode && end == prefill;
    item.evicts_prefill = !item.decode && (end % chunk == 0 || item.ends_prefill);
    // Row i predicts token first + i + 1: outputs begin with the prompt's last row.
    item.num_outputs = std::max<int64_t>(0, end - std::max(item.first, prompt - 1));
    if (item.ends_prefill) item.completions = s.request.completions();
    if (s.scores()) {
      item.forced = absl::MakeConstSpan(s.request.forced).subspan(s.num_outputs, item.num_outputs);
    } else {
      item.outputs = absl::MakeConstSpan(s.tokens).subspan(prompt);
      if (s.num_outputs < s.request.min_output_tokens) item.masked = s.ends;
      if (s.constraint.has_value()) item.allowed = s.constraint->allowed();
    }
    items.push_back(item);
    sequences.push_back(&s);
  }
  return items;
}

// If the forward fails as a whole, each sequence runs once alone, so that only the guilty one
// fails.
std::vector<ForwardOutcome> Engine::RunForward(absl::Span<const WorkItem> items) {
  absl::StatusOr<std::vector<ForwardOutcome>> together = executor_->Forward(items);
  if (together.ok()) return *std::move(together);
  std::vector<ForwardOutcome> outcomes;
  outcomes.reserve(items.size());
  for (const WorkItem& item : items) {
    absl::StatusOr<std::vector<ForwardOutcome>> alone =
        items.size() > 1 ? executor_->Forward({&item, 1}) : std::move(together);
    if (alone.ok()) {
      outcomes.push_back(std::move(alone->front()));
    } else {
      outcomes.push_back({.status = absl::InternalError(
                              absl::StrCat("the forward failed: ", alone.status().message()))});
    }
  }
  return outcomes;
}

// Runs what is one sequence's own: if it throws, that sequence ends, and no other notices.
template <class Work>
void Engine::Guard(Sequence& s, Work work) {
  try {
    work();
  } catch (const std::exception& e) {
    Finish(s, FinishReason::kError,
           absl::InternalError(absl::StrCat("the engine failed: ", e.what())));
  }
}

void Engine::Fail(absl::Status status) {
  if (idle_ != nullptr) Finish(*idle_, FinishReason::kError, status);
  idle_.reset();
  for (auto& [id, s] : waiting_) Finish(*s, FinishReason::kError, status);
  for (SequencePtr& s : running_) Finish(*s, FinishReason::kError, status);
  DropFinished();
}

void Engine::Deliver(Sequence& s, const WorkItem& item, ForwardOutcome outcome) {
  if (!outcome.status.ok()) return Finish(s, FinishReason::kError, std::move(outcome.status));
  s.cached += static_cast<int64_t>(item.tokens.size());
  Delta delta{.prompt = std::move(outcome.prompt)};
  const bool whole_prompt = item.first == 0 && item.ends_prefill;
  if (s.request.output.progress && !item.decode && !whole_prompt) {
    delta.progress = {
        .done = s.cached, .total = s.request.prefill_tokens(), .cached = s.from_prefix};
  }
  if (!outcome.residual_steps.empty()) {
    delta.residual_steps.push_back(std::move(outcome.residual_steps));
  }
  Say(s, std::move(delta), absl::MakeSpan(outcome.outputs));
  if (!outcome.siblings.empty() && !s.finished) BeginSiblings(s, absl::MakeSpan(outcome.siblings));
}

void Engine::Say(Sequence& s, Delta delta, absl::Span<OutputToken> outputs) {
  delta.completion = s.completion;
  std::optional<StopMatch> stop;
  absl::Status constrained;
  for (OutputToken& output : outputs) {
    const absl::Time now = now_();
    if (s.num_outputs == 0) {
      s.first_token = now;
      if (s.completion == 0) ObserverOf(s).OnFirstToken(s.request, now - s.request.arrival);
    }
    s.last_token = now;
    ++s.num_outputs;
    if (!s.request.force_in_chunks) s.tokens.push_back(output.token);
    delta.tokens.push_back(output.token);
    if (s.scores() || s.request.output.logprobs) delta.logprobs.push_back(output.logprob);
    if (s.request.output.top_logprobs > 0) delta.top_logprobs.push_back(std::move(output.top));
    if (s.scores()) {
      delta.greedy.push_back(output.greedy);
      continue;
    }
    TextStream::Piece piece = s.text.Append(output.token);
    delta.text += piece.text;
    stop = std::move(piece.stop);
    if (s.constraint.has_value() && !stop.has_value()) {
      constrained = s.constraint->Accept(output.token);
    }
  }
  if (!constrained.ok()) return Finish(s, FinishReason::kError, std::move(constrained));
  const bool at_length = s.num_outputs == s.request.max_output_tokens;
  const bool at_end = s.constraint.has_value() && s.constraint->must_end();
  if (!stop.has_value() && (at_length || at_end) && !s.scores()) {
    delta.text += s.text.Flush().text;
  }
  if (!s.request.output.text) delta.text.clear();
  const bool says_something = !delta.tokens.empty() || !delta.residual_steps.empty() ||
                              delta.progress.has_value() || !delta.prompt.tokens.empty();
  if (says_something) s.sink->OnDelta(std::move(delta));

  if (stop.has_value()) {
    s.stop = std::move(stop);
    Finish(s, ReasonOf(s));
  } else if (at_end) {
    Finish(s, FinishReason::kEnd);
  } else if (at_length) {
    Finish(s, FinishReason::kLength);
  }
}

void Engine::BeginSiblings(Sequence& first, absl::Span<OutputToken> outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    const int64_t completion = static_cast<int64_t>(i) + 1;
    Request request = first.request;
    request.sampling = SamplingOf(request.sampling, completion);
    request.demand.completions = 1;
    auto sibling = std::make_unique<Sequence>(SequenceId{next_id_++}, std::move(request),
                                              first.sink, tokenizer_);
    sibling->completion = completion;
    sibling->family = first.family;
    sibling->cached = first.cached;
    sibling->from_prefix = first.from_prefix;
    sibling->admitted = first.admitted;
    Say(*sibling, {}, outputs.subspan(i, 1));
    if (first.finished) return;  // it has failed, and all with it
    first.family->siblings.push_back(std::move(sibling));
  }
}

void Engine::Part(Sequence& first) {
  const std::shared_ptr<Family> family = first.family;
  family->parted = true;
  family->prompt_kv = executor_->Facts(first.id);
  family->prompt_rounds = first.rounds;
  family->prompt_evicted = first.evicted_entries;
  family->total.kv.rounds = first.rounds;
  family->total.kv.evicted_entries = first.evicted_entries;
  std::vector<Sequence*> members = {&first};
  for (SequencePtr& sibling : std::exchange(family->siblings, {})) {
    Sequence& s = *sibling;
    s.rounds = first.rounds;
    s.evicted_entries = first.evicted_entries;
    running_.push_back(std::move(sibling));
    members.push_back(&s);
    if (s.ended_early.has_value()) continue;
    ledger_.Reserve(s.id, s.request.demand.decode_bytes);
    s.open = true;
    if (absl::Status status = executor_->Fork(first.id, s.id, s.request); !status.ok()) {
      return Finish(s, FinishReason::kError, std::move(status));
    }
  }
  for (Sequence* s : members) {
    if (s->ended_early.has_value()) Finish(*s, *s->ended_early);
  }
}

// If nothing of it could be begun, each sequence alone.
std::vector<SettleOutcome> Engine::RunSettle(absl::Span<const WorkItem> items) {
  try {
    return executor_->Settle(items);
  } catch (const std::exception&) {
  }
  std::vector<SettleOutcome> outcomes(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    try {
      outcomes[i] = std::move(executor_->Settle({&items[i], 1}).front());
    } catch (const std::exception& e) {
      outcomes[i].status = absl::InternalError(absl::StrCat("it could not be settled: ", e.what()));
    }
  }
  return outcomes;
}

void Engine::Settle(absl::Span<const WorkItem> items, absl::Span<Sequence* const> sequences) {
  std::vector<WorkItem> live;
  std::vector<Sequence*> owners;
  for (size_t i = 0; i < items.size(); ++i) {
    if (sequences[i]->finished) continue;
    live.push_back(items[i]);
    owners.push_back(sequences[i]);
  }
  if (live.empty()) return;
  const absl::Time begin = absl::Now();
  std::vector<SettleOutcome> outcomes = RunSettle(live);
  const absl::Duration share = (absl::Now() - begin) / static_cast<int64_t>(live.size());
  for (size_t i = 0; i < live.size(); ++i) {
    Sequence& s = *owners[i];
    if (s.finished) continue;  // with another of its completions
    s.eviction_time += share;
    Guard(s, [&] { OnSettled(s, live[i], std::move(outcomes[i])); });
  }
  for (size_t i = 0; i < live.size(); ++i) {
    if (live[i].completions <= 1 || owners[i]->finished) continue;
    Guard(*owners[i], [&] { Part(*owners[i]); });
  }
}

void Engine::OnSettled(Sequence& s, const WorkItem& item, SettleOutcome outcome) {
  if (!outcome.status.ok()) return Finish(s, FinishReason::kError, std::move(outcome.status));
  if (item.ends_prefill) ledger_.Shrink(s.id, s.request.demand.decode_bytes);
  if (outcome.evicted_entries == 0) return;
  ++s.rounds;
  s.evicted_entries += outcome.evicted_entries;
  ObserverOf(s).OnEvicted({.request = s.request,
                           .entries = outcome.evicted_entries,
                           .in_prefill = !item.decode,
                           .time = outcome.eviction_time,
                           .attention_mass = outcome.attention_mass});
  if (s.request.output.kv_trace) DeliverTrace(s, std::move(outcome.trace));
}

void Engine::DeliverTrace(Sequence& s, EvictionTrace trace) {
  for (const EvictionTrace::Victims& victims : trace.victims) {
    s.trace_victims += static_cast<int64_t>(victims.index.size());
  }
  if (s.trace_victims > options_.max_trace_victims) {
    s.trace_truncated = true;
    return;
  }
  trace.completion = s.completion;
  Delta delta{.completion = s.completion};
  delta.evictions.push_back(std::move(trace));
  s.sink->OnDelta(std::move(delta));
}

FinishReason Engine::ReasonOf(const Sequence& s) {
  const auto* token = std::get_if<StopToken>(&*s.stop);
  if (token == nullptr) return FinishReason::kStopString;
  const auto& user = s.request.stop_tokens;
  const bool asked = std::find(user.begin(), user.end(), token->id) != user.end();
  return asked ? FinishReason::kStopToken : FinishReason::kEnd;
}

void Engine::Finish(Sequence& s, FinishReason reason, absl::Status status) {
  if (s.finished) return;
  if (s.family != nullptr) return FinishFamily(s, reason, std::move(status));
  Finished finished = Close(s, reason, std::move(status));
  Quietly([&] {
    if (s.open && &s != idle_.get()) {  // at idle it is no traffic
      if (finished.status.ok()) LearnOutput(s);
      LearnEnd(s.request, finished);
    }
    ObserverOf(s).OnFinished(s.request, finished);
  });
  s.sink->OnFinished(std::move(finished));
}

void Engine::FinishFamily(Sequence& s, FinishReason reason, absl::Status status) {
  const std::shared_ptr<Family> family = s.family;
  if (status.ok() && !family->parted) {
    s.ended_early = reason;
    return;
  }
  auto end = [&](Sequence& member) {
    Finished closed = Close(member, reason, status);
    --family->live;
    Quietly([&] { family->Add(member, closed); });
    return closed;
  };
  if (status.ok()) {
    Finished closed = end(s);
    Quietly([&] {
      LearnOutput(s);
      s.sink->OnDelta({.completion = s.completion, .ended = std::move(closed)});
    });
    if (family->live > 0) return;
  } else {
    end(s);
    for (SequencePtr& member : running_) {
      if (member != nullptr && member->family == family && !member->finished) end(*member);
    }
    family->siblings.clear();
    family->total.reason = reason;
    family->total.status = std::move(status);
  }
  Finished& total = family->total;
  total.kv.peak_entries = std::max(family->prompt_kv.peak_entries, family->held_entries);
  total.kv.peak_bytes = std::max(family->prompt_kv.peak_bytes, family->held_bytes);
  Quietly([&] {
    LearnEnd(family->request, total);
    observer_.OnFinished(family->request, total);
  });
  s.sink->OnFinished(std::move(total));
}

Finished Engine::Close(Sequence& s, FinishReason reason, absl::Status status) {
  s.finished = true;
  CacheFacts facts;
  if (s.open) {  // first of all: what is told of it may not fit into memory
    Quietly([&] { facts = executor_->Facts(s.id); });
    executor_->Close(s.id);
    ledger_.Release(s.id);
  }
  const absl::Time now = now_();
  Finished finished{.reason = reason,
                    .status = std::move(status),
                    .prompt_tokens = static_cast<int64_t>(s.request.prompt.size()),
                    .cached_prompt_tokens = s.from_prefix,
                    .output_tokens = s.num_outputs,
                    .kv_trace_truncated = s.trace_truncated};
  if (reason == FinishReason::kStopString) {
    Quietly([&] {
      finished.stop_string = s.request.stop_strings[std::get<StopString>(*s.stop).index];
    });
  }
  if (reason == FinishReason::kStopToken) finished.stop_token = std::get<StopToken>(*s.stop).id;
  finished.timings.queue = (s.admitted == absl::Time() ? now : s.admitted) - s.request.arrival;
  if (s.num_outputs > 0) {
    finished.timings.prefill = s.first_token - s.admitted;
    finished.timings.time_to_first_token = s.first_token - s.request.arrival;
    finished.timings.decode = s.last_token - s.first_token;
  }
  finished.timings.eviction = s.eviction_time;
  finished.kv.evicted_entries = s.evicted_entries;
  finished.kv.rounds = s.rounds;
  if (!s.open && s.family != nullptr) {  // ended with its first token
    facts.entries = s.family->prompt_kv.entries;
    Quietly([&] { facts.kept = s.family->prompt_kv.kept; });
  }
  finished.kv.final_entries = facts.entries;
  finished.kv.kept = std::move(facts.kept);
  finished.kv.peak_entries = facts.peak_entries;
  finished.kv.peak_bytes = facts.peak_bytes;
  // A completion holds the prompt's cache, too, for as long as it is shared.
  if (s.family != nullptr) {
    Family& family = *s.family;
    (family.parted ? family.held_entries : family.prompt_kv.peak_entries) += facts.peak_entries;
    (family.parted ? family.held_bytes : family.prompt_kv.peak_bytes) += facts.peak_bytes;
    finished.kv.peak_entries = std::max(finished.kv.peak_entries, family.prompt_kv.peak_entries);
    finished.kv.peak_bytes = std::max(finished.kv.peak_bytes, family.prompt_kv.peak_bytes);
  }
  return finished;
}

// What forecasts learn from a request that was running, and from one of its completions.
void Engine::LearnEnd(const Request& request, const Finished& finished) {
  const bool timed_out = absl::IsDeadlineExceeded(finished.status);
  if (request.deadline != absl::InfiniteFuture() && (finished.status.ok() || timed_out)) {
    pace_.OnDeadline(timed_out);
  }
}

void Engine::LearnOutput(const Sequence& s) {
  if (!s.scores()) pace_.OnOutput(s.num_outputs - 1, s.request.max_output_tokens - 1);
}

void Engine::DropFinished() {
  std::erase_if(waiting_, [this](const auto& entry) {
    if (entry.second->finished) queue_.Remove(entry.first);
    return entry.second->finished;
  });
  std::erase_if(running_, [](const SequencePtr& s) { return s->finished; });
}

}  // namespace epikv
