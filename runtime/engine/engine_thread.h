#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "runtime/admission/forecast.h"
#include "runtime/base/steady_cond_var.h"
#include "runtime/engine/core_budget.h"
#include "runtime/engine/engine.h"
#include "runtime/request/request.h"

namespace epikv {

// Where several tenants wait, each may have his share of it although others fill the queue. So
// twice as much may wait in all.
struct QueueLimits {
  int64_t max_requests = 1024;   // waiting
  int64_t max_tokens = 4 << 20;  // of waiting requests: prompts and max outputs
};

// Why Submit refused.
enum class SubmitError { kNone, kQueueFull, kDuplicateId, kDraining, kDeadlineInfeasible };

struct SubmitResult {
  SubmitError error = SubmitError::kNone;
  int64_t waiting = 0;         // requests, all
  int64_t waiting_tokens = 0;  // theirs
  // Of kQueueFull: of which there would be too many.
  enum class Full { kRequests, kTokens } full = Full::kRequests;
  int64_t limit = 0;
  Forecast forecast;
  // When trying again is worth while. Of kQueueFull always; of kDeadlineInfeasible unless the
  // request alone takes longer than it had as it arrived.
  std::optional<absl::Duration> retry_after;
};

// Runs one Engine on a thread of its own. All other threads meet it here and nowhere else: a mutex,
// and an inbox that is swapped whole once per step.
class EngineThread {
 public:
  // `on_start` runs first on the new thread (it sets the thread's OpenMP team size). cores: taken
  // for each step; the budget outlives the thread. rest: so long after the last work WhenIdle is
  // run, after which a step takes its memory anew.
  EngineThread(std::unique_ptr<Engine> engine, QueueLimits limits, std::function<void()> on_start,
               CoreShare cores = {}, absl::Duration rest = absl::Seconds(10));
  // Cancels what is live and joins.
  ~EngineThread();

  // An id is its tenant's: those of others are no duplicates of it.
  SubmitResult Submit(Request request, std::shared_ptr<RequestSink> sink);

  // Runs a request that nobody waits for (see Engine::SubmitIdle) while nothing is live here, and
  // with a CoreBudget at none of its engines: what comes ends it within one step, as do a drain and
  // EndIdle. It is not live. False: something is, or such a request is under way, or no request is
  // taken; its sink hears nothing.
  bool SubmitIdle(Request request, std::shared_ptr<RequestSink> sink);
  void EndIdle();

  // False if no such request is live, or not of this tenant (null: of any; there may be several,
  // and all are cancelled). Their sinks' OnFinished follows within one step.
  bool Cancel(const std::string& request_id, const absl::Status& status,
              const std::string* tenant = nullptr);
  // The same, if that request is `sink`'s: an id is free again before its sink hears of the end.
  bool CancelOf(const RequestSink& sink, const std::string& request_id, absl::Status status);

  // What is live, between two steps. tell: on the engine's thread, or at once if that has ended.
  void Describe(std::function<void(std::vector<RequestFacts>)> tell);

  // Forgets the cached prefixes of prompts, between two steps.
  void DropPrefixes();

  int64_t live() const;  // requests that wait or run

  // How long the step that runs has lasted, what was done before it included; zero between steps.
  absl::Duration StepAge() const;

  // From now on; what waits stays.
  void SetLimits(QueueLimits limits);

  // A sink that was not Ready has become so.
  void Wake();

  // Refuses new requests from now on and returns; live ones go on.
  void StartDraining();
  // Takes them again, unless the thread is stopping.
  void Resume();
  // Blocks until nothing is live and every sink has heard of its end, at most until `deadline` (of
  // SteadyNow); then cancels the rest and waits for their ends. Implies StartDraining.
  void Drain(absl::Time deadline);

 private:
  bool IsWithinShare(const std::string& tenant, const Work& work) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);

  using RequestKey = std::pair<std::string, std::string>;  // tenant, id
  struct Live {
    const RequestSink* sink = nullptr;
  };
  struct Submitted {
    Request request;
    std::shared_ptr<RequestSink> sink;
  };
  struct Cancelled {
    RequestKey request;
    absl::Status status;
  };
  struct Asked {
    std::function<void(Engine&)> of;
  };
  using Message = std::variant<Submitted, Cancelled, Asked>;
  class TrackedSink;
  class IdleSink;

  void Run();
  bool Step();
  void Post(Message message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PostEndIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // `wait`: until there is something to do, at most until `until`.
  std::vector<Message> TakeInbox(bool wait, absl::Time until);
  bool IsCalled() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return !inbox_.empty() || woken_ || stopping_;
  }
  bool Rests();  // nothing comes and nothing is due for `rest_`
  void Handle(std::vector<Message> messages);
  bool Publish();  // the engine's outlook; false: stop
  void OnEnding(const RequestKey& request);
  void OnIdleEnding();
  // When to try again what had time enough, but for those ahead of it in the queue.
  absl::Duration RetryAfterDrop(const Work& work);
  void OnEnded();

  const CoreShare cores_;
  const absl::Duration rest_;
  mutable absl::Mutex mu_;
  SteadyCondVar changed_;  // anything below that the thread, or Drain, waits for
  QueueLimits limits_ ABSL_GUARDED_BY(mu_);
  std::vector<Message> inbox_ ABSL_GUARDED_BY(mu_);
  bool woken_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  absl::flat_hash_map<RequestKey, Live> live_ ABSL_GUARDED_BY(mu_);
  bool ending_ ABSL_GUARDED_BY(mu_) = false;  // a sink is hearing of its end
  bool idle_ ABSL_GUARDED_BY(mu_) = false;    // the request of SubmitIdle has not ended
  Outlook outlook_ ABSL_GUARDED_BY(mu_);      // after the last step, with what came since
  Backlog submitted_ ABSL_GUARDED_BY(mu_);    // in the inbox
  RetryTimes retries_ ABSL_GUARDED_BY(mu_);
  std::atomic<int64_t> step_began_ = 0;   // of SteadyTime, in nanoseconds; 0: no step runs
  const std::unique_ptr<Engine> engine_;  // of the thread alone, but for its options
  std::thread thread_;
};

}  // namespace epikv
