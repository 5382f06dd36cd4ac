#include "runtime/engine/engine.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "runtime/base/reason.h"
#include "runtime/base/steady_time.h"
#include "runtime/engine/completion_group.h"
#include "runtime/engine/sequence.h"
#include "runtime/engine/stage_clock.h"

namespace epikv {
namespace {

// Steps to come may take longer than those before.
constexpr double kMargin = 1.25;
// Of a request, whose times are told.
constexpr size_t kFirstRounds = 12;

absl::Time EarlierOf(absl::Time a, absl::Time b) { return a < b ? a : b; }

// Runs what a request's end can do without: if it throws, for lack of memory, it is left out.
template <class Work>
void Quietly(Work work) {
  try {
    work();
  } catch (const std::exception&) {
  }
}

}  // namespace

Engine::Engine(EngineOptions options, std::unique_ptr<StepExecutor> executor,
               const Tokenizer& tokenizer, EngineObserver& observer,
               std::function<absl::Time()> now, std::unique_ptr<Drafter> drafter)
    : options_(std::move(options)),
      executor_(std::move(executor)),
      drafter_(std::move(drafter)),
      tokenizer_(tokenizer),
      observer_(observer),
      now_(std::move(now)),
      ledger_(options_.kv_capacity_bytes),
      tier_ledger_(options_.tier_capacity_bytes),
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
  if (ledger_.reserved() + executor_->prefix_bytes() + bytes > ledger_.capacity() ||
      !tier_ledger_.Fits(request.demand.peak_tier_bytes())) {
    return refuse(absl::ResourceExhaustedError("the KV pool has no room for it"));
  }
  idle_ = std::make_unique<Sequence>(SequenceId{next_id_++}, std::move(request), std::move(sink),
                                     tokenizer_);
  Reserve(idle_->id, bytes, idle_->request.demand.peak_tier_bytes());
  idle_->open = true;
  idle_->admitted = now_();
  const absl::StatusOr<int64_t> cached =
      executor_->Open(idle_->id, idle_->request, executor_->prefix_bytes());
  if (!cached.ok()) return EndIdle(cached.status());
  idle_->cached = *cached;
  idle_->from_prefix = *cached - idle_->request.packet_tokens;
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

bool Engine::Cancel(const std::string& request_id, absl::Status status, const std::string* tenant) {
  auto end = [&](Sequence& s) {
    if (s.finished || s.request.id != request_id) return false;
    if (tenant != nullptr && s.request.scheduling.tenant != *tenant) return false;
    Finish(s, FinishReason::kCancelled, std::move(status));
    return true;
  };
  const bool found =
      std::any_of(waiting_.begin(), waiting_.end(), [&](auto& w) { return end(*w.second); }) ||
      std::any_of(running_.begin(), running_.end(), [&](auto& s) { return end(*s); });
  DropFinished();
  return found;
}

void Engine::CancelAll(const absl::Status& status) {
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
  RequestFacts facts = s.Facts();
  facts.kv_used_bytes = s.open ? executor_->Facts(s.id).bytes : 0;
  facts.kv_reserved_bytes = s.open ? ledger_.held(s.id) : s.request.demand.peak_bytes();
  return facts;
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
  if (!unread_.empty()) {
    clock.Charge(Stage::kSchedule);
    ReadTokens();
    clock.Charge(Stage::kDeliver);
  }
  Admit();
  std::vector<Sequence*> sequences;
  std::vector<WorkItem> items = PlanStep(running_, sequences);
  const size_t planned = items.size();
  AddGuesses(items, sequences, clock);
  clock.Charge(Stage::kSchedule);
  if (items.empty()) {
    const bool idled = idles() && StepIdle();
    Report(StepStats());  // what ended without a step shows
    return idled || !unread_.empty();
  }

  std::vector<ForwardOutcome> outcomes = RunForward(items, sequences);
  clock.Charge(Stage::kForward);

  Done done;
  outcomes.resize(planned);
  const bool guessed = items.size() > planned && sequences[planned]->guesses_hold;
  for (size_t i = planned; guessed && i < items.size(); ++i) {
    ++step.guessed_tokens;
    ++sequences[i]->guessed_tokens;
  }
  Conclude(absl::MakeConstSpan(items).first(planned), absl::MakeConstSpan(sequences).first(planned),
           std::move(outcomes), step, clock, done);
  if (guessed) {
    ConcludeGuesses(absl::MakeConstSpan(items).subspan(planned),
                    absl::MakeConstSpan(sequences).subspan(planned), step, clock, done);
  }
  executor_->AddStageTimes(step);

  DropFinished();
  const absl::Duration took = now_() - begin;
  PaceMeter::PerStream per_stream;
  if (done.told > 0) {
    per_stream = {.most = static_cast<double>(done.most),
                  .mean = static_cast<double>(done.told) / static_cast<double>(done.streams)};
  }
  pace_.OnStep(waited + took, done.read, done.told, per_stream);
  if (done.read == 0) {
    const absl::Duration drafted = step.wall[static_cast<int>(Stage::kDraft)];
    // Not below zero: stages have a clock of their own, and `now_` may stand still.
    step_cost_.OnStep(std::ssize(items), std::max(took - drafted, absl::ZeroDuration()));
  }
  step.sequences = static_cast<int64_t>(planned);
  clock.ChargeTotal();
  Report(step);
  return true;
}

void Engine::Conclude(absl::Span<const WorkItem> items, absl::Span<Sequence* const> sequences,
                      std::vector<ForwardOutcome> outcomes, StepStats& step, StageClock& clock,
                      Done& done) {
  for (size_t i = 0; i < items.size(); ++i) {
    if (outcomes[i].status.ok()) {
      const auto tokens = std::ssize(items[i].tokens);
      (items[i].decode ? done.told : done.read) += tokens;
      if (items[i].decode && items[i].ahead == 0) ++done.streams;
      if (items[i].decode) done.most = std::max(done.most, items[i].ahead + tokens);
      (items[i].pass     ? step.pass_tokens
       : items[i].decode ? step.decode_tokens
                         : step.prefill_tokens) += tokens;
    }
    if (sequences[i]->finished) continue;  // with another of its completions
    Guard(*sequences[i], [&] { Deliver(*sequences[i], items[i], std::move(outcomes[i])); });
  }
  clock.Charge(Stage::kDeliver);
  Settle(items, sequences);
  clock.Charge(Stage::kEvict);
}

// As a step, but that forecasts learn nothing and observers hear nothing of it. False: its reader
// is not ready.
bool Engine::StepIdle() {
  if (idle_->unread.has_value()) {  // nobody else waits
    Guard(*idle_, [&] { ReadToken(*idle_); });
    if (idle_->finished) {
      idle_.reset();
      return true;
    }
  }
  std::vector<Sequence*> sequences;
  const std::vector<WorkItem> items = PlanStep({&idle_, 1}, sequences);
  if (items.empty()) return false;
  std::vector<ForwardOutcome> outcomes = RunForward(items, sequences);
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
  step.tier_reserved_bytes = tier_ledger_.reserved();
  step.tier_capacity_bytes = tier_ledger_.capacity();
  step.kv_prefix_bytes = executor_->prefix_bytes();
  executor_->AddPool(step);
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
  auto seconds = [](absl::Duration d) { return absl::StrFormat("%.3f", absl::ToDoubleSeconds(d)); };
  absl::Status late =
      WithReason(absl::DeadlineExceededError(
                     absl::StrCat("the deadline cannot be met: it is ", seconds(left),
                                  " s away, and the request would run for ", seconds(run), " s")),
                 kDeadlineInfeasible);
  // The estimate does not say how long it would wait: even without waiting it would be late.
  for (const auto& [key, value] :
       {std::pair("seconds_left", std::max(left, absl::ZeroDuration())),
        std::pair("wait_seconds", absl::ZeroDuration()), std::pair("run_seconds", run)}) {
    late = WithMetadata(std::move(late), key, seconds(value));
  }
  return late;
}

void Engine::EndLost() {
  if (!executor_->lost()) return;
  const absl::Status lost = absl::InternalError(
      "the KV cache was lost: moving its rows failed, and they could not be put back");
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
    const KvDemand& demand = waiting->request.demand;
    if (!ledger_.Fits(demand.peak_bytes()) || !tier_ledger_.Fits(demand.peak_tier_bytes())) break;
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
    s.last_step = steps_;
    Guard(s, [&] { Open(s); });
    if (!s.finished) continue;
    running_.pop_back();  // the next may have its place
    EndLost();
  }
}

void Engine::Reserve(SequenceId id, int64_t bytes, int64_t tier_bytes) {
  ledger_.Reserve(id, bytes);
  try {
    tier_ledger_.Reserve(id, tier_bytes);
  } catch (...) {
    ledger_.Release(id);
    throw;
  }
}

void Engine::Open(Sequence& s) {
  if (s.request.completions() > 1) s.group = std::make_shared<CompletionGroup>(s.request);
  Reserve(s.id, s.request.demand.peak_bytes(), s.request.demand.peak_tier_bytes());
  s.open = true;
  const int64_t prefix_bytes =
      std::min(options_.max_prefix_bytes, ledger_.capacity() - ledger_.reserved());
  absl::StatusOr<int64_t> cached = executor_->Open(s.id, s.request, prefix_bytes);
  if (!cached.ok()) return Finish(s, FinishReason::kError, std::move(cached).status());
  s.cached = *cached;
  s.guess_record = RecordOf(s);
  s.from_prefix = *cached - s.request.packet_tokens;
  if (s.from_prefix > 0) {  // as if it had come so far itself
    const CacheFacts facts = executor_->Facts(s.id);
    s.rounds = facts.rounds;
    s.evicted_entries = facts.evicted_entries;
  }
  pace_.OnPrompt(s.request.prefill_tokens() - s.cached, s.request.computed_tokens());
  observer_.OnAdmitted(s.request, s.admitted - s.request.arrival, s.from_prefix);
}

std::vector<WorkItem> Engine::PlanStep(absl::Span<const SequencePtr> running,
                                       std::vector<Sequence*>& sequences) {
  std::vector<SequenceView> views;
  views.reserve(running.size());
  for (const SequencePtr& s : running) {
    const bool is_read = s->sink->Ready();
    if (!is_read) s->waited_for_reader = true;
    SequenceView view{.prefill_tokens = s->request.prefill_tokens(),
                      .cached_tokens = s->cached,
                      .ready = is_read && !s->unread.has_value(),
                      .tenant = s->request.scheduling.tenant,
                      .last_step = s->last_step};
    if (s->pass.size() > 1) {  // it runs as a prompt does
      view.prefill_tokens = std::ssize(s->pass);
      view.cached_tokens = s->pass_done;
    }
    views.push_back(view);
  }
  turns_.Set(absl::MakeSpan(views));
  const std::vector<PlannedItem> plan = PlanWithRounds(running, absl::MakeSpan(views));
  turns_.OnPlanned(views, plan);
  std::vector<WorkItem> items;
  const int64_t chunk = options_.scheduler.prefill_chunk_tokens;
  ++steps_;
  for (const PlannedItem& planned : plan) {
    Sequence& s = *running[planned.sequence];
    s.last_step = steps_;
    items.push_back(s.NextWork(planned.num_tokens, chunk));
    sequences.push_back(&s);
  }
  return items;
}

std::vector<PlannedItem> Engine::PlanWithRounds(absl::Span<const SequencePtr> running,
                                                absl::Span<SequenceView> views) const {
  for (;;) {
    std::vector<PlannedItem> plan = Plan(views, options_.scheduler);
    for (PlannedItem& planned : plan) {
      const Sequence& s = *running[planned.sequence];
      const KvDemand& demand = s.request.demand;
      if (demand.prefill_round_pairs == 0) continue;
      const WorkItem work = s.NextWork(planned.num_tokens, options_.scheduler.prefill_chunk_tokens);
      if (!executor_->MayRound(work)) continue;
      planned.round_pairs =
          work.in_prefill() ? demand.prefill_round_pairs : demand.decode_round_pairs;
    }
    const std::vector<int64_t> out = WithoutRoom(views, plan, options_.scheduler.max_round_pairs);
    if (out.empty()) return plan;
    for (const int64_t place : out) views[place].ready = false;  // others have its tokens
  }
}

// If the forward fails as a whole, each sequence runs once alone, so that only the guilty one
// fails.
std::vector<ForwardOutcome> Engine::RunForward(absl::Span<const WorkItem> items,
                                               absl::Span<Sequence* const> sequences) {
  absl::StatusOr<std::vector<ForwardOutcome>> together = executor_->Forward(items);
  if (together.ok()) return *std::move(together);
  std::vector<ForwardOutcome> outcomes;
  outcomes.reserve(items.size());
  for (Sequence* const s : sequences) s->guesses_hold = false;
  for (const WorkItem& item : items) {
    if (item.ahead > 0) break;  // no more than guesses follow
    absl::StatusOr<std::vector<ForwardOutcome>> alone =
        items.size() > 1 ? executor_->Forward({&item, 1}) : together.status();
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
void Engine::Guard(Sequence& s, absl::FunctionRef<void()> work) {
  try {
    work();
  } catch (const std::exception& e) {
    Finish(s, FinishReason::kError,
           absl::InternalError(absl::StrCat("the engine failed: ", e.what())));
  }
}

void Engine::Fail(const absl::Status& status) {
  if (idle_ != nullptr) Finish(*idle_, FinishReason::kError, status);
  idle_.reset();
  for (auto& [id, s] : waiting_) Finish(*s, FinishReason::kError, status);
  for (SequencePtr& s : running_) Finish(*s, FinishReason::kError, status);
  DropFinished();
}

void Engine::Deliver(Sequence& s, const WorkItem& item, ForwardOutcome outcome) {
  if (!outcome.status.ok()) return Finish(s, FinishReason::kError, std::move(outcome.status));
  if (item.pass) {
    s.pass_done += std::ssize(item.tokens);
    return;
  }
  s.cached += static_cast<int64_t>(item.tokens.size());
  s.settled = false;
  Delta delta{.prompt = std::move(outcome.prompt)};
  const bool whole_prompt = item.first == 0 && item.ends_prefill;
  if (s.request.output.progress && !item.decode && !whole_prompt) {
    delta.progress = {
        .done = s.cached, .total = s.request.prefill_tokens(), .cached = s.from_prefix};
  }
  if (!outcome.residual_steps.empty()) {
    delta.residual_steps.push_back(std::move(outcome.residual_steps));
  }
  Emit(s, std::move(delta), absl::MakeSpan(outcome.outputs));
  if (!outcome.siblings.empty() && !s.finished) BeginSiblings(s, absl::MakeSpan(outcome.siblings));
}

void Engine::Emit(Sequence& s, Delta delta, absl::Span<OutputToken> outputs) {
  delta.completion = s.completion;
  std::optional<StopMatch> stop;
  for (OutputToken& output : outputs) {
    const absl::Time now = now_();
    if (s.num_outputs == 0) {
      s.first_token = now;
      if (s.completion == 0) ObserverOf(s).OnFirstToken(s.request, now - s.request.arrival);
    } else if (!s.scores() && !s.waited_for_reader) {
      ObserverOf(s).OnToken(s.request, now - s.last_token);
    }
    s.waited_for_reader = false;
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
    if (s.thinking.has_value()) s.thinking->Append(output.token);
    TextStream::Piece piece = s.text.Append(output.token);
    s.Tell(piece.text, delta);
    stop = std::move(piece.stop);
    if (s.constraint.has_value() && !stop.has_value()) s.unread = output.token;
  }
  const bool at_length = s.num_outputs == s.request.max_output_tokens;
  const bool is_last = !stop.has_value() && at_length && !s.unread.has_value();
  if (is_last && !s.scores()) s.Tell(s.text.Flush().text, delta);
  if ((stop.has_value() || is_last) && s.answer.has_value()) delta.answer.Append(s.answer->Flush());
  if (!s.request.output.text) delta.text.clear();
  const bool says_something = !delta.tokens.empty() || !delta.residual_steps.empty() ||
                              delta.progress.has_value() || !delta.prompt.tokens.empty();
  if (says_something) s.sink->OnDelta(std::move(delta));
  if (s.unread.has_value()) return AwaitReading(s);
  if (stop.has_value()) s.stop = std::move(stop);
  EndIfLast(s);
}

void Engine::EndIfLast(Sequence& s) {
  if (s.stop.has_value()) {
    Finish(s, s.StopReason());
  } else if (s.constraint.has_value() && s.constraint->must_end()) {
    Finish(s, FinishReason::kEnd);
  } else if (s.num_outputs == s.request.max_output_tokens) {
    Finish(s, FinishReason::kLength);
  }
}

// A completion that has not forked waits until it has: until then nothing but its group knows it.
// At idle there is nobody to take turns with.
void Engine::AwaitReading(Sequence& s) {
  if (&s == idle_.get() || (s.completion > 0 && !s.group->forked)) return;
  unread_[s.request.scheduling.tenant].push_back(&s);
}

void Engine::ReadToken(Sequence& s) {
  absl::Status read = s.constraint->Accept(*std::exchange(s.unread, std::nullopt));
  if (!read.ok()) return Finish(s, FinishReason::kError, std::move(read));
  if (s.constraint->must_end() || s.num_outputs == s.request.max_output_tokens) {
    Delta rest{.completion = s.completion};
    s.Tell(s.text.Flush().text, rest);
    if (s.answer.has_value()) rest.answer.Append(s.answer->Flush());
    if (!s.request.output.text) rest.text.clear();
    if (!rest.text.empty() || !rest.answer.empty()) s.sink->OnDelta(std::move(rest));
  }
  EndIfLast(s);
}

// At a step's begin, and never as a token is told: what becomes of a completion must not depend on
// whether it had to wait. Guesses that came true are read where they do: what they lead to is
// known.
void Engine::ReadTokens() {
  for (int64_t work = 0; work < options_.constraint_work;) {
    Sequence* const s = NextToRead();
    if (s == nullptr) break;
    Guard(*s, [&] { ReadToken(*s); });
    work += s->constraint->work();
  }
  DropFinished();
}

Sequence* Engine::NextToRead() {
  while (!unread_.empty()) {
    auto tenant = unread_.upper_bound(last_reader_);
    if (tenant == unread_.end()) tenant = unread_.begin();
    last_reader_ = tenant->first;
    Sequence* const s = tenant->second.front();
    tenant->second.pop_front();
    if (tenant->second.empty()) unread_.erase(tenant);
    if (!s->finished) return s;
  }
  return nullptr;
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
    sibling->group = first.group;
    sibling->cached = first.cached;
    sibling->from_prefix = first.from_prefix;
    sibling->admitted = first.admitted;
    Emit(*sibling, {}, outputs.subspan(i, 1));
    if (first.finished) return;  // it has failed, and all with it
    first.group->siblings.push_back(std::move(sibling));
  }
}

void Engine::ForkCompletions(Sequence& first) {
  const std::shared_ptr<CompletionGroup> group = first.group;
  group->forked = true;
  group->prompt_kv = executor_->Facts(first.id);
  group->prompt_rounds = first.rounds;
  group->prompt_evicted = first.evicted_entries;
  group->total.kv.rounds = first.rounds;
  group->total.kv.evicted_entries = first.evicted_entries;
  std::vector<Sequence*> members = {&first};
  for (SequencePtr& sibling : std::exchange(group->siblings, {})) {
    Sequence& s = *sibling;
    s.rounds = first.rounds;
    s.evicted_entries = first.evicted_entries;
    s.pass_time = first.pass_time;
    s.last_step = first.last_step;
    running_.push_back(std::move(sibling));
    members.push_back(&s);
    if (s.unread.has_value()) AwaitReading(s);
    if (s.ended_early.has_value()) continue;
    Reserve(s.id, s.request.demand.decode_bytes, s.request.demand.tier_bytes);
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
      outcomes[i].status = absl::InternalError(
          absl::StrCat("the step could not be finished for this request: ", e.what()));
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
  const absl::Time begin = SteadyNow();
  std::vector<SettleOutcome> outcomes = RunSettle(live);
  const absl::Duration share = (SteadyNow() - begin) / static_cast<int64_t>(live.size());
  for (size_t i = 0; i < live.size(); ++i) {
    Sequence& s = *owners[i];
    if (s.finished) continue;  // with another of its completions
    s.eviction_time += share;
    Guard(s, [&] { OnSettled(s, live[i], std::move(outcomes[i])); });
    s.settled = s.pass.empty();
    if (s.settled && s.group == nullptr && s.ended_early.has_value()) Finish(s, *s.ended_early);
  }
  for (size_t i = 0; i < live.size(); ++i) {
    if (live[i].completions <= 1 || owners[i]->finished || !owners[i]->pass.empty()) continue;
    Guard(*owners[i], [&] { ForkCompletions(*owners[i]); });
  }
}

void Engine::OnSettled(Sequence& s, const WorkItem& item, SettleOutcome outcome) {
  if (!outcome.status.ok()) return Finish(s, FinishReason::kError, std::move(outcome.status));
  const bool more = !outcome.pass.empty();
  if (!item.pass && more) s.pass_begin = now_();
  if (item.pass && s.pass_done < std::ssize(s.pass))
    return;  // the rest of these tokens comes first
  if (item.pass && !more) s.pass_time += now_() - s.pass_begin;
  s.pass = std::move(outcome.pass);
  s.pass_done = 0;
  if (more) return;
  if ((item.ends_prefill || item.pass) && s.cached == s.request.prefill_tokens()) {
    ledger_.Shrink(s.id, s.request.demand.decode_bytes);
    tier_ledger_.Shrink(s.id, s.request.demand.tier_bytes);
  }
  if (outcome.evicted_entries == 0) return;
  s.guesses_hold = false;
  ++s.rounds;
  if (s.first_rounds.size() < kFirstRounds) {
    s.first_rounds.push_back({.end = now_() - s.request.arrival,
                              .time = outcome.eviction_time,
                              .entries = outcome.evicted_entries});
  }
  s.evicted_entries += outcome.evicted_entries;
  ObserverOf(s).OnEvicted({.request = s.request,
                           .entries = outcome.evicted_entries,
                           .in_prefill = item.in_prefill(),
                           .time = outcome.eviction_time,
                           .attention_mass = outcome.attention_mass});
  if (s.request.output.kv_trace) DeliverTrace(s, std::move(outcome.trace));
}

void Engine::DeliverTrace(Sequence& s, EvictionTrace trace) {
  for (const EvictionTrace::Victims& victims : trace.victims) {
    s.trace_victims += static_cast<int64_t>(victims.index.size() + victims.recalled.size());
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

void Engine::Finish(Sequence& s, FinishReason reason, absl::Status status) {
  if (s.finished) return;
  if (s.group != nullptr) return FinishGroup(s, reason, std::move(status));
  if (s.request.output.packet && status.ok() && !s.settled) {
    s.ended_early = reason;
    return;
  }
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

void Engine::FinishGroup(Sequence& s, FinishReason reason, absl::Status status) {
  const std::shared_ptr<CompletionGroup> group = s.group;
  if (status.ok() && !group->forked) {
    s.ended_early = reason;
    return;
  }
  auto end = [&](Sequence& member) {
    Finished closed = Close(member, reason, status);
    --group->live;
    Quietly([&] { group->Add(member, closed); });
    return closed;
  };
  if (status.ok()) {
    Finished closed = end(s);
    Quietly([&] {
      LearnOutput(s);
      s.sink->OnDelta({.completion = s.completion, .ended = std::move(closed)});
    });
    if (group->live > 0) return;
  } else {
    end(s);
    for (SequencePtr& member : running_) {
      if (member != nullptr && member->group == group && !member->finished) end(*member);
    }
    for (const SequencePtr& sibling : group->siblings) {  // which have no more than first tokens
      group->total.output_tokens += sibling->num_outputs;
    }
    group->siblings.clear();
    group->total.reason = reason;
    group->total.status = std::move(status);
  }
  Finished& total = group->total;
  total.kv.peak_entries = std::max(group->prompt_kv.peak_entries, group->held_entries);
  total.kv.peak_bytes = std::max(group->prompt_kv.peak_bytes, group->held_bytes);
  Quietly([&] {
    LearnEnd(group->request, total);
    observer_.OnFinished(group->request, total);
  });
  s.sink->OnFinished(std::move(total));
}

Finished Engine::Close(Sequence& s, FinishReason reason, absl::Status status) {
  s.finished = true;
  CacheFacts facts;
  int64_t packed_bytes = 0;
  std::shared_ptr<const Packet> packet;
  if (s.drafts.value_or(false)) drafter_->Close(s.id);
  if (s.open) {  // first of all: what is told of it may not fit into memory
    if (s.request.output.packet && status.ok()) {
      Quietly([&] { packet = executor_->Export(s.id, absl::MakeSpan(s.tokens).first(s.cached)); });
    }
    Quietly([&] {
      facts = executor_->Facts(s.id);
      packed_bytes = executor_->PackedBytes(s.id);
    });
    executor_->Close(s.id);
    ledger_.Release(s.id);
    tier_ledger_.Release(s.id);
  }
  const absl::Time now = now_();
  Finished finished{.reason = reason,
                    .status = std::move(status),
                    .packet = std::move(packet),
                    .prompt_tokens = static_cast<int64_t>(s.request.prompt.size()),
                    .cached_prompt_tokens = s.from_prefix,
                    .packet_tokens = s.request.packet_tokens,
                    .output_tokens = s.num_outputs,
                    .thinking_tokens = s.thinking.has_value() ? s.thinking->num_tokens() : 0,
                    .guessed_tokens = s.guessed_tokens,
                    .accepted_tokens = s.accepted_tokens,
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
  finished.timings.pass =
      s.pass_time + (s.pass.empty() ? absl::ZeroDuration() : now - s.pass_begin);
  finished.kv.evicted_entries = s.evicted_entries;
  finished.kv.rounds = s.rounds;
  finished.kv.first_rounds = std::move(s.first_rounds);
  if (!s.open && s.group != nullptr) {  // ended with its first token
    facts.entries = s.group->prompt_kv.entries;
    Quietly([&] { facts.kept = s.group->prompt_kv.kept; });
  }
  finished.kv.final_entries = facts.entries;
  finished.kv.kept = std::move(facts.kept);
  finished.kv.peak_entries = facts.peak_entries;
  finished.kv.peak_bytes = facts.peak_bytes;
  finished.kv.packed_bytes = packed_bytes;
  finished.kv.reads = facts.reads;
  finished.kv.tier = facts.tier;
  // A completion holds the prompt's cache, too, for as long as it is shared.
  if (s.group != nullptr) {
    CompletionGroup& group = *s.group;
    (group.forked ? group.held_entries : group.prompt_kv.peak_entries) += facts.peak_entries;
    (group.forked ? group.held_bytes : group.prompt_kv.peak_bytes) += facts.peak_bytes;
    finished.kv.peak_entries = std::max(finished.kv.peak_entries, group.prompt_kv.peak_entries);
    finished.kv.peak_bytes = std::max(finished.kv.peak_bytes, group.prompt_kv.peak_bytes);
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
  for (auto& [tenant, queue] : unread_) {
    std::erase_if(queue, [](const Sequence* s) { return s->finished; });
  }
  std::erase_if(unread_, [](const auto& entry) { return entry.second.empty(); });
  std::erase_if(running_, [](const SequencePtr& s) { return s->finished; });
}

}  // namespace epikv
