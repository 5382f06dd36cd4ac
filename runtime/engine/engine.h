#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "runtime/admission/forecast.h"
#include "runtime/admission/ledger.h"
#include "runtime/admission/queue.h"
#include "runtime/base/steady_time.h"
#include "runtime/engine/guess_plan.h"
#include "runtime/engine/observer.h"
#include "runtime/engine/scheduler.h"
#include "runtime/request/request.h"
#include "runtime/step/drafter.h"
#include "runtime/step/step_executor.h"
#include "runtime/text/tokenizer.h"

namespace epikv {

struct EngineOptions {
  SchedulerOptions scheduler;
  QueueRule queue;
  // Requests that cannot meet their deadlines are refused, and dropped while they wait.
  bool refuse_infeasible_deadlines = true;
  int64_t kv_capacity_bytes = 0;
  int64_t tier_capacity_bytes = 0;  // below the pool
  int64_t max_prefix_bytes = 0;     // of the pool, for cached prefixes, while no request needs them
  int64_t max_running_requests = 256;
  int64_t max_trace_victims = 65536;  // of one request's eviction trace
  // Of a step, what constraints may take before those that are left wait for their turn, in units
  // of ConstraintState::work: about 50 ms, and one token more, which may take 200. As much again
  // for what may follow guesses.
  int64_t constraint_work = 1'000'000;
};

class StageClock;  // stage_clock.h
struct Sequence;   // sequence.h

// Serves requests step by step: admit -> plan -> forward -> sample -> deliver -> observe -> evict.
// Owns queue, sequences and ledger; has no thread of its own and no locks: one thread calls it.
class Engine {
 public:
  // `tokenizer` and `observer` outlive the engine. now: the clock, for tests. drafter: for requests
  // of GuessSource::kDraft; null: there are none.
  Engine(EngineOptions options, std::unique_ptr<StepExecutor> executor, const Tokenizer& tokenizer,
         EngineObserver& observer, std::function<absl::Time()> now = SteadyNow,
         std::unique_ptr<Drafter> drafter = nullptr);
  ~Engine();

  // Queues a request. Its sink hears from Step, or from Cancel.
  void Submit(Request request, std::shared_ptr<RequestSink> sink);

  // Runs a request that nobody waits for, alone, while nothing is live: whatever is submitted ends
  // it, before a step, as does EndIdle. It is no traffic: no queue, observer or forecast knows of
  // it; what it holds of the pool shows. One at a time. Its sink hears from Step, or of its end:
  // kCancelled where it gives way, kResourceExhausted at once where the pool, cached prefixes kept,
  // has no room for it.
  void SubmitIdle(Request request, std::shared_ptr<RequestSink> sink);
  void EndIdle(absl::Status status);
  bool idles() const { return idle_ != nullptr; }  // such a request runs

  // Ends a live request with `status`; its KV is free on return. False if there is none.
  bool Cancel(const std::string& request_id, absl::Status status,
              const std::string* tenant = nullptr);
  void CancelAll(const absl::Status& status);
  // Ends all live requests: Step has thrown.
  void Fail(const absl::Status& status);

  // Ends what is past its deadline or cannot meet it, admits what fits, and runs one step of what
  // is ready. False: nothing could run. waited: for cores, before this step; forecasts count it.
  bool Step(absl::Duration waited = absl::ZeroDuration());

  // Forgets the cached prefixes of prompts.
  void DropPrefixes() { executor_->DropPrefixes(); }

  // When Step has to be called next although nothing can run: the earliest deadline.
  absl::Time NextDeadline() const;

  // Requests that hold KV, or will; each of several completions is one.
  int64_t running() const;
  int64_t waiting() const { return queue_.size(); }
  // After the last step.
  const Outlook& outlook() const { return outlook_; }
  const EngineOptions& options() const { return options_; }
  std::vector<RequestFacts> Describe();  // those that run, then those that wait
  const Ledger& ledger() const { return ledger_; }
  const Ledger& tier_ledger() const { return tier_ledger_; }
  const StepExecutor& executor() const { return *executor_; }

 private:
  using SequencePtr = std::unique_ptr<Sequence>;

  void ExpireDeadlines();
  RequestFacts FactsOf(const Sequence& sequence) const;
  // Ends all that run if the executor has lost what they hold, also those whose readers pause.
  void EndLost();
  void Admit();
  // Begins a sequence that has been admitted. bytes: of the pool, its demand.
  void Open(Sequence& sequence);
  // Reserves what a sequence may hold, of the pool and of the tier, or throws and has reserved
  // nothing.
  void Reserve(SequenceId id, int64_t bytes, int64_t tier_bytes);
  // Not OK: a request that began now and ran so long would miss its deadline.
  absl::Status Infeasible(const Request& request, absl::Duration run, absl::Time now) const;
  std::vector<WorkItem> PlanStep(absl::Span<const SequencePtr> running,
                                 std::vector<Sequence*>& sequences);
  // Adds to a step what its sequences guess, behind its items: first all that are one ahead.
  void AddGuesses(std::vector<WorkItem>& items, std::vector<Sequence*>& sequences,
                  StageClock& clock);
  // Guesses that one step may run behind a decoding sequence's item, at most.
  int64_t MostGuesses(const Sequence& sequence, const WorkItem& work) const;
  // The drafter has the sequence open, or takes it now.
  bool Drafts(Sequence& sequence);
  // The drafter has failed: the sequence looks its guesses up from now on.
  void EndDraft(Sequence& sequence);
  struct Drafting {
    Sequence* sequence = nullptr;
    int64_t most = 0;  // guesses
    std::vector<int32_t>* guesses = nullptr;
  };
  // Of a step without its guesses.
  struct StepRows {
    int64_t rows = 0, decoding = 0;  // all, and those that give a token each
    int64_t room = 0;                // for guesses
    int64_t unused = 0;              // of max_step_tokens
  };
  void AskDrafter(absl::Span<const Drafting> drafts, const StepRows& step);
  // Of the guesses that there were, the step runs none, as they cannot be.
  static void OnUnused(Sequence& sequence);
  // As far as one step may run them: up to what ends the output, or starts a round.
  void CutGuesses(const Sequence& sequence, const WorkItem& work,
                  std::vector<int32_t>& guesses) const;
  // Of all requests that guess as it does.
  GuessRecord& RecordOf(const Sequence& sequence);
  // How many of its guesses the sequence's constraint allows, as far as `work` of the step lets one
  // see.
  int64_t AllowedGuesses(Sequence& sequence, absl::Span<const int32_t> guesses,
                         int64_t& work) const;
  // The constraint reads the newest token out of turn.
  void ReadAtOnce(Sequence& sequence);
  // The guess of an item ahead is what came.
  bool CameTrue(const Sequence& sequence, const WorkItem& item) const;
  // What a step has done, in tokens: read as prompts are, and told as decoded ones are.
  struct Done {
    int64_t read = 0, told = 0;
    int64_t streams = 0, most = 0;  // that decoded; of told, those of one of them at most
  };
  // Delivers what a forward has given, and settles it.
  void Conclude(absl::Span<const WorkItem> items, absl::Span<Sequence* const> sequences,
                std::vector<ForwardOutcome> outcomes, StepStats& step, StageClock& clock,
                Done& done);
  // The same of guesses, as far as they came true: of each sequence one after the other.
  void ConcludeGuesses(absl::Span<const WorkItem> items, absl::Span<Sequence* const> sequences,
                       StepStats& step, StageClock& clock, Done& done);
  bool StepIdle();
  void Guard(Sequence& sequence, absl::FunctionRef<void()> work);
  // Who is told of a sequence.
  EngineObserver& ObserverOf(const Sequence& sequence);
  std::vector<ForwardOutcome> RunForward(absl::Span<const WorkItem> items,
                                         absl::Span<Sequence* const> sequences);
  void Deliver(Sequence& sequence, const WorkItem& item, ForwardOutcome outcome);
  // Hands output tokens on; what ends with them ends.
  void Emit(Sequence& sequence, Delta delta, absl::Span<OutputToken> outputs);
  // Ends a sequence whose newest token is its last.
  void EndIfLast(Sequence& sequence);
  // Lets constraints read the newest tokens: tenants in turns, each one's oldest first.
  void ReadTokens();
  void ReadToken(Sequence& sequence);
  void AwaitReading(Sequence& sequence);
  // Of those that wait to be read, the next; null: none.
  Sequence* NextToRead();
  // The completions 1, 2 .. of a request whose prompt is cached, with their first tokens.
  void BeginSiblings(Sequence& first, absl::Span<OutputToken> outputs);
  // The prompt is settled: from here each completion has KV of its own.
  void ForkCompletions(Sequence& first);
  // Who runs in the next step. Those for whose rounds it has no room become not ready.
  std::vector<PlannedItem> PlanWithRounds(absl::Span<const SequencePtr> running,
                                          absl::Span<SequenceView> views) const;
  std::vector<SettleOutcome> RunSettle(absl::Span<const WorkItem> items);
  void Settle(absl::Span<const WorkItem> items, absl::Span<Sequence* const> sequences);
  void OnSettled(Sequence& sequence, const WorkItem& item, SettleOutcome outcome);
  void DeliverTrace(Sequence& sequence, EvictionTrace trace);
  // Ends a sequence: frees its KV, tells sink and observer. It is dropped at the step's end.
  // One of several completions ends alone if it ends well, else with all the others.
  void Finish(Sequence& sequence, FinishReason reason, absl::Status status = absl::OkStatus());
  void FinishGroup(Sequence& sequence, FinishReason reason, absl::Status status);
  // Frees its KV and says how it ended.
  Finished Close(Sequence& sequence, FinishReason reason, absl::Status status);
  void LearnEnd(const Request& request, const Finished& finished);
  void LearnOutput(const Sequence& sequence);
  void DropFinished();
  Outlook LookOut() const;
  void Report(StepStats step);

  const EngineOptions options_;
  const std::unique_ptr<StepExecutor> executor_;
  const std::unique_ptr<Drafter> drafter_;
  const Tokenizer& tokenizer_;
  EngineObserver& observer_;
  const std::function<absl::Time()> now_;
  Ledger ledger_, tier_ledger_;  // of the pool, and of what lies below it
  RequestQueue queue_;
  PrefillTurns turns_;
  std::map<SequenceId, SequencePtr> waiting_;  // what the queue orders; in order of arrival
  std::vector<SequencePtr> running_;           // in order of admission
  // Of those that run, whose constraints have a token to read, by tenant.
  std::map<std::string, std::deque<Sequence*>> unread_;
  std::string last_reader_;  // the tenant whose turn was the last
  SequencePtr idle_;         // of SubmitIdle; null: none. Then nothing is live
  EngineObserver nobody_;
  PaceMeter pace_;
  StepCost step_cost_;
  GuessRecord guess_record_, draft_record_;  // of all requests: of looking up, and of the drafter
  Outlook outlook_;
  int64_t next_id_ = 0, steps_ = 0;
  int64_t drafts_left_out_ = 0;  // steps without drafts, as they do not pay
};

}  // namespace epikv
