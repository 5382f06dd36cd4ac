#include "runtime/engine/engine_thread.h"

#include <exception>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "runtime/base/reason.h"
#include "runtime/base/steady_time.h"
#include "runtime/base/when_idle.h"

namespace epikv {
namespace {

absl::Status WhyDrained() {
  return WithReason(
      absl::UnavailableError(
          "the server is draining, and the time for running requests is over; try another server"),
      kDraining);
}

absl::Status EngineFailed(const std::exception& e) {
  return absl::InternalError(absl::StrCat("the engine failed: ", e.what()));
}

}  // namespace

// Tells the thread when a request ends.
class EngineThread::TrackedSink final : public RequestSink {
 public:
  TrackedSink(EngineThread& thread, const Request& request, std::shared_ptr<RequestSink> sink)
      : thread_(thread),
        request_(request.scheduling.tenant, request.id),
        work_(WorkOf(request)),
        sink_(std::move(sink)) {}

  bool Ready() const override { return sink_->Ready(); }
  void OnDelta(Delta delta) override { sink_->OnDelta(std::move(delta)); }
  void OnFinished(Finished finished) override {
    // The id is free before the client hears of the end, so that it may use it again.
    thread_.OnEnding(request_);
    if (ReasonOf(finished.status) == kDeadlineInfeasible) {
      finished.status = WithRetryAfter(std::move(finished.status), thread_.RetryAfterDrop(work_));
    }
    const absl::Cleanup ended = [this] { thread_.OnEnded(); };
    sink_->OnFinished(std::move(finished));
  }

 private:
  EngineThread& thread_;
  const RequestKey request_;
  const Work work_;
  const std::shared_ptr<RequestSink> sink_;
};

// Tells the thread when the request of SubmitIdle has ended.
class EngineThread::IdleSink final : public RequestSink {
 public:
  IdleSink(EngineThread& thread, std::shared_ptr<RequestSink> sink)
      : thread_(thread), sink_(std::move(sink)) {}

  bool Ready() const override { return sink_->Ready(); }
  void OnDelta(Delta delta) override { sink_->OnDelta(std::move(delta)); }
  void OnFinished(Finished finished) override {
    thread_.OnIdleEnding();  // before its sink, who may submit the next one, hears of it
    const absl::Cleanup ended = [this] { thread_.OnEnded(); };
    sink_->OnFinished(std::move(finished));
  }

 private:
  EngineThread& thread_;
  const std::shared_ptr<RequestSink> sink_;
};

EngineThread::EngineThread(std::unique_ptr<Engine> engine, QueueLimits limits,
                           std::function<void()> on_start, CoreShare cores, absl::Duration rest)
    : cores_(cores),
      rest_(rest),
      limits_(limits),
      outlook_(engine->outlook()),
      engine_(std::move(engine)) {
  thread_ = std::thread([this, on_start = std::move(on_start)] {
    if (on_start) on_start();
    Run();
  });
}

EngineThread::~EngineThread() {
  {
    absl::MutexLock lock(&mu_);
    draining_ = true;
    stopping_ = true;
    changed_.Signal();
  }
  thread_.join();
}

SubmitResult EngineThread::Submit(Request request, std::shared_ptr<RequestSink> sink) {
  const Work work = WorkOf(request);
  const absl::Time now = SteadyNow();
  absl::MutexLock lock(&mu_);
  if (draining_) return {.error = SubmitError::kDraining};
  const RequestKey key(request.scheduling.tenant, request.id);
  if (live_.contains(key)) return {.error = SubmitError::kDuplicateId};
  const Work waiting = outlook_.waiting.total();
  SubmitResult result{.waiting = static_cast<int64_t>(waiting.requests),
                      .waiting_tokens = static_cast<int64_t>(waiting.tokens),
                      .forecast = Predict(outlook_, request, now)};
  const absl::Duration late =
      result.forecast.least_wait + result.forecast.least_run - (request.deadline - now);
  if (engine_->options().refuse_infeasible_deadlines && outlook_.measured &&
      late > absl::ZeroDuration()) {
    result.error = SubmitError::kDeadlineInfeasible;
    // What it lost on its way here it may have, if it comes again.
    if (result.forecast.least_run <= request.deadline - request.arrival) {
      result.retry_after = retries_.After(late, work, outlook_, now);
    }
    return result;
  }
  const bool too_many = result.waiting >= limits_.max_requests;
  // Alone, a request may be over the limit of tokens: it would be refused for ever.
  const bool too_long =
      result.waiting > 0 && waiting.tokens + work.tokens > static_cast<double>(limits_.max_tokens);
  if ((too_many || too_long) && !IsWithinShare(request.scheduling.tenant, work)) {
    result.error = SubmitError::kQueueFull;
    result.full = too_many ? SubmitResult::Full::kRequests : SubmitResult::Full::kTokens;
    result.limit = too_many ? limits_.max_requests : limits_.max_tokens;
    result.retry_after = retries_.After(absl::ZeroDuration(), work, outlook_, now);
    return result;
  }
  live_.emplace(key, Live{.sink = sink.get()});
  outlook_.waiting.Add(request.scheduling, work);
  submitted_.Add(request.scheduling, work);
  auto tracked = std::make_shared<TrackedSink>(*this, request, std::move(sink));
  Post(Submitted{std::move(request), std::move(tracked)});
  return result;
}

bool EngineThread::IsWithinShare(const std::string& tenant, const Work& work) const {
  const Work& all = outlook_.waiting.total();
  const Work own = outlook_.waiting.Of(tenant);
  const auto tenants =
      static_cast<double>(outlook_.waiting.NumTenants() + (own.requests == 0 ? 1 : 0));
  const auto most_requests = static_cast<double>(limits_.max_requests),
             most_tokens = static_cast<double>(limits_.max_tokens);
  return tenants > 1 && own.requests + work.requests <= most_requests / tenants &&
         own.tokens + work.tokens <= most_tokens / tenants &&
         all.requests + work.requests <= 2 * most_requests &&
         all.tokens + work.tokens <= 2 * most_tokens;
}

bool EngineThread::SubmitIdle(Request request, std::shared_ptr<RequestSink> sink) {
  absl::MutexLock lock(&mu_);
  if (draining_ || idle_ || !live_.empty()) return false;
  idle_ = true;
  auto tracked = std::make_shared<IdleSink>(*this, std::move(sink));
  auto shared = std::make_shared<Request>(std::move(request));
  Post(Asked{[shared, tracked](Engine& engine) {
    try {
      engine.SubmitIdle(std::move(*shared), tracked);
    } catch (const std::exception& e) {
      if (engine.idles()) return engine.EndIdle(EngineFailed(e));
      tracked->OnFinished({.reason = FinishReason::kError, .status = EngineFailed(e)});
    }
  }});
  return true;
}

void EngineThread::EndIdle() {
  absl::MutexLock lock(&mu_);
  PostEndIdle();
}

void EngineThread::Post(Message message) {
  inbox_.push_back(std::move(message));
  changed_.Signal();
}

void EngineThread::PostEndIdle() {
  if (!idle_) return;
  Post(Asked{[](Engine& engine) { engine.EndIdle(absl::CancelledError("it was to end")); }});
}

bool EngineThread::Cancel(const std::string& request_id, const absl::Status& status,
                          const std::string* tenant) {
  absl::MutexLock lock(&mu_);
  bool found = false;
  for (const auto& [key, live] : live_) {
    if (key.second != request_id || (tenant != nullptr && key.first != *tenant)) continue;
    Post(Cancelled{key, status});
    found = true;
  }
  return found;
}

bool EngineThread::CancelOf(const RequestSink& sink, const std::string& request_id,
                            absl::Status status) {
  absl::MutexLock lock(&mu_);
  for (const auto& [key, live] : live_) {
    if (live.sink != &sink || key.second != request_id) continue;
    Post(Cancelled{key, std::move(status)});
    return true;
  }
  return false;
}

void EngineThread::Describe(std::function<void(std::vector<RequestFacts>)> tell) {
  {
    absl::MutexLock lock(&mu_);
    if (!stopping_) {
      Post(Asked{[tell = std::move(tell)](Engine& engine) { tell(engine.Describe()); }});
      return;
    }
  }
  tell({});
}

void EngineThread::DropPrefixes() {
  absl::MutexLock lock(&mu_);
  Post(Asked{[](Engine& engine) { engine.DropPrefixes(); }});
}

int64_t EngineThread::live() const {
  absl::MutexLock lock(&mu_);
  return static_cast<int64_t>(live_.size());
}

absl::Duration EngineThread::StepAge() const {
  const int64_t began = step_began_;
  return began == 0 ? absl::ZeroDuration() : SteadyTime() - absl::Nanoseconds(began);
}

void EngineThread::SetLimits(QueueLimits limits) {
  absl::MutexLock lock(&mu_);
  limits_ = limits;
}

void EngineThread::Wake() {
  absl::MutexLock lock(&mu_);
  woken_ = true;
  changed_.Signal();
}

void EngineThread::StartDraining() {
  absl::MutexLock lock(&mu_);
  draining_ = true;
  PostEndIdle();
}

void EngineThread::Resume() {
  absl::MutexLock lock(&mu_);
  draining_ = stopping_;
}

void EngineThread::Drain(absl::Time deadline) {
  absl::MutexLock lock(&mu_);
  draining_ = true;
  PostEndIdle();
  auto idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return live_.empty() && !ending_ && !idle_;
  };
  if (changed_.Wait(mu_, deadline - SteadyNow(), idle)) return;
  for (const auto& [key, live] : live_) {
    Post(Cancelled{key, WhyDrained()});
  }
  changed_.Wait(mu_, absl::InfiniteDuration(), idle);
}

std::vector<EngineThread::Message> EngineThread::TakeInbox(bool wait, absl::Time until) {
  absl::MutexLock lock(&mu_);
  auto called = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return IsCalled(); };
  if (wait) changed_.Wait(mu_, until - SteadyNow(), called);
  woken_ = false;
  submitted_ = {};  // they count as waiting until the engine says how many of them do
  return std::exchange(inbox_, {});
}

bool EngineThread::Rests() {
  if (engine_->NextDeadline() - SteadyNow() < rest_) return false;
  absl::MutexLock lock(&mu_);
  return !changed_.Wait(mu_, rest_,
                        [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return IsCalled(); });
}

// One that fails, for lack of memory, keeps no other from being heard.
void EngineThread::Handle(std::vector<Message> messages) {
  for (Message& message : messages) {
    std::shared_ptr<RequestSink> submitter;
    try {
      if (auto* submitted = std::get_if<Submitted>(&message)) {
        submitter = submitted->sink;
        engine_->Submit(std::move(submitted->request), std::move(submitted->sink));
      } else if (auto* cancelled = std::get_if<Cancelled>(&message)) {
        engine_->Cancel(cancelled->request.second, std::move(cancelled->status),
                        &cancelled->request.first);
      } else {
        std::get<Asked>(message).of(*engine_);
      }
    } catch (const std::exception& e) {
      if (submitter == nullptr) continue;
      submitter->OnFinished({.reason = FinishReason::kError, .status = EngineFailed(e)});
    }
  }
}

bool EngineThread::Publish() {
  Outlook outlook = engine_->outlook();
  absl::MutexLock lock(&mu_);
  std::swap(outlook_, outlook);
  outlook_.waiting += submitted_;
  return !stopping_;
}

void EngineThread::OnEnding(const RequestKey& request) {
  absl::MutexLock lock(&mu_);
  live_.erase(request);
  ending_ = true;
}

void EngineThread::OnIdleEnding() {
  absl::MutexLock lock(&mu_);
  idle_ = false;
  ending_ = true;
}

absl::Duration EngineThread::RetryAfterDrop(const Work& work) {
  absl::MutexLock lock(&mu_);
  return retries_.After(absl::ZeroDuration(), work, outlook_, SteadyNow());
}

void EngineThread::OnEnded() {
  absl::MutexLock lock(&mu_);
  ending_ = false;
  changed_.Signal();
}

bool EngineThread::Step() {
  if (cores_.budget == nullptr) return engine_->Step();
  if (engine_->idles()) {
    const std::optional<CoreBudget::Lease> lease = cores_.budget->TakeIdle(cores_.threads);
    if (lease.has_value()) return engine_->Step();
    engine_->EndIdle(absl::CancelledError("it gave way to another engine"));
  }
  const absl::Time begin = SteadyNow();
  const CoreBudget::Lease lease = cores_.budget->Take(cores_.threads);
  return engine_->Step(SteadyNow() - begin);
}

void EngineThread::Run() {
  bool busy = false, worked = false;
  do {
    if (!busy && std::exchange(worked, false) && Rests()) WhenIdle::Run();
    try {
      std::vector<Message> messages = TakeInbox(/*wait=*/!busy, engine_->NextDeadline());
      step_began_ = absl::ToInt64Nanoseconds(SteadyTime());
      Handle(std::move(messages));
      busy = Step();
    } catch (const std::exception& e) {  // of no one sequence: nobody knows what has been done
      engine_->Fail(EngineFailed(e));
      busy = true;
    }
    step_began_ = 0;
    worked = true;
  } while (Publish());
  // Nothing is submitted once draining; what came before ends here.
  Handle(TakeInbox(/*wait=*/false, absl::InfinitePast()));
  engine_->CancelAll(WhyDrained());
}

}  // namespace epikv
