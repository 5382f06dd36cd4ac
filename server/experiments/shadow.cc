#include "server/experiments/shadow.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/random/random.h"
#include "absl/synchronization/notification.h"
#include "runtime/base/steady_time.h"

namespace epikv {

// The output, and how it ended. A row has the likeliest tokens and, behind them, the one that is
// forced: both passes know of it.
class Shadow::OutputSink final : public RequestSink {
 public:
  bool Ready() const override { return true; }
  void OnDelta(Delta delta) override {
    for (size_t i = 0; i < delta.top_logprobs.size(); ++i) {
      std::vector<TokenLogprob>& row = output_.rows.emplace_back(std::move(delta.top_logprobs[i]));
      const TokenLogprob forced = {.token = delta.tokens[i], .logprob = delta.logprobs[i]};
      if (std::find(row.begin(), row.end(), forced) == row.end()) row.push_back(forced);
    }
    output_.tokens.insert(output_.tokens.end(), delta.tokens.begin(), delta.tokens.end());
  }
  void OnFinished(Finished finished) override {
    status_ = std::move(finished.status);
    ended_.Notify();
  }

  absl::StatusOr<Output> Await() {
    ended_.WaitForNotification();
    if (!status_.ok()) return status_;
    return std::move(output_);
  }

 private:
  Output output_;
  absl::Status status_;
  absl::Notification ended_;
};

void Shadow::Tap::OnDelta(const Delta& delta) {
  outputs_.insert(outputs_.end(), delta.tokens.begin(), delta.tokens.end());
}

void Shadow::Tap::OnFinished(const Finished& finished) {
  if (!finished.status.ok()) return;
  for (Sample& sample : samples_) {
    sample.shown.request.forced = outputs_;
    if (!outputs_.empty()) {
      shadow_.Put(std::move(sample));
    } else if (sample.hidden.has_value()) {
      shadow_.Tell(sample, ShadowFate::kFailed);
    }
  }
}

Shadow::Shadow(const ShadowOptions& options, const Models& models, ShadowObserver& observer)
    : options_(options), models_(models), observer_(observer) {
  thread_ = std::thread([this] { Run(); });
}

Shadow::~Shadow() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
    if (replaying_ != nullptr) replaying_->engine->EndIdle();
  }
  stop_.Signal();
  thread_.join();
}

std::shared_ptr<Shadow::Tap> Shadow::Follow(const v1::RequestBegan& began, const ModelPtr& model,
                                            const Request& request,
                                            const std::optional<Request>& hidden) {
  if (request.completions() > 1) return nullptr;
  const bool sampled = absl::Bernoulli(absl::InsecureBitGen(), options_.share_of_requests);
  if (!sampled && !hidden.has_value()) return nullptr;
  v1::RequestBegan dealt = began;
  dealt.clear_parts();
  for (const v1::RequestBegan::Part& part : began.parts()) {
    if (!part.forced() && !part.washed_out()) *dealt.add_parts() = part;
  }
  if (dealt.parts().empty()) return nullptr;
  const Sample sample{.began = std::move(dealt), .model = model, .shown = {.request = request}};
  std::vector<Sample> samples;
  if (sampled) samples.push_back(sample);
  if (hidden.has_value()) samples.emplace_back(sample).hidden = Answer{.request = *hidden};
  return std::make_shared<Tap>(*this, std::move(samples));
}

int64_t Shadow::TokensOf(const Answer& answer) {
  return static_cast<int64_t>(answer.request.prompt.size() + answer.request.forced.size());
}

int64_t Shadow::TokensOf(const Sample& sample) {
  return TokensOf(sample.shown) + (sample.hidden.has_value() ? TokensOf(*sample.hidden) : 0);
}

void Shadow::Put(Sample sample) {
  if (TokensOf(sample.shown) > options_.longest) return Tell(sample, ShadowFate::kFailed);
  std::vector<Sample> displaced;
  {
    absl::MutexLock lock(&mu_);
    tokens_ += TokensOf(sample);
    samples_.push_back(std::move(sample));
    while (tokens_ > options_.max_tokens ||
           static_cast<int64_t>(samples_.size()) > options_.max_requests) {
      displaced.push_back(PopOldest());
    }
    observer_.OnShadowWaiting(static_cast<int64_t>(samples_.size()));
  }
  for (const Sample& gone : displaced) Tell(gone, ShadowFate::kDisplaced);
}

Shadow::Sample Shadow::PopOldest() {
  Sample oldest = std::move(samples_.front());
  samples_.pop_front();
  tokens_ -= TokensOf(oldest);
  return oldest;
}

// The oldest, once there is time for it; none: the end.
std::optional<Shadow::Sample> Shadow::Take() {
  auto called = [this]()
                    ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || !samples_.empty(); };
  for (;;) {
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(&called));
      auto stopping = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_; };
      if (stop_.Wait(mu_, next_ - SteadyTime(), stopping)) return std::nullopt;
    }
    const bool busy = Busy();
    absl::MutexLock lock(&mu_);
    if (busy) next_ = SteadyTime() + options_.look_every;
    if (busy || samples_.empty()) continue;
    Sample oldest = PopOldest();
    observer_.OnShadowWaiting(static_cast<int64_t>(samples_.size()));
    return oldest;
  }
}

// Models share the cores: what one replays takes them from the others.
bool Shadow::Busy() const {
  const std::vector<ModelPtr> models = models_.Live();
  return std::any_of(models.begin(), models.end(),
                     [](const ModelPtr& model) { return model->engine->live() > 0; });
}

void Shadow::Run() {
  while (std::optional<Sample> sample = Take()) {
    const ModelPtr model = sample->model.lock();
    if (model == nullptr || models_.Replaced(*model)) {
      Tell(*sample, ShadowFate::kFailed);
      continue;
    }
    const absl::Duration begin = SteadyTime();
    const absl::Status advanced = Advance(*sample, model);
    const absl::Duration end = SteadyTime();
    const absl::Duration rest = (end - begin) * (1 / options_.share_of_time - 1);
    {
      absl::MutexLock lock(&mu_);
      next_ = end + (advanced.ok() ? rest : std::max(rest, options_.look_every));
    }
    observer_.OnShadowTime(end - begin, absl::IsCancelled(advanced));
    Settle(*std::move(sample), advanced);
  }
}

// What is done stays done. kCancelled: it gave way; kUnavailable: nothing could begin since.
absl::Status Shadow::Advance(Sample& sample, const ModelPtr& model) {
  std::vector<Answer*> answers = {&sample.shown};
  if (sample.hidden.has_value()) answers.push_back(&*sample.hidden);
  for (Answer* answer : answers) {
    if (answer->found.has_value()) continue;
    if (answer->request.forced.empty()) {
      absl::StatusOr<Output> output = OutputOf(answer->request, 0, model);
      if (!output.ok()) return output.status();
      if (output->tokens.empty()) return absl::FailedPreconditionError("an answer of no tokens");
      answer->request.forced = std::move(output->tokens);
      sample.tries = 0;
    }
    if (TokensOf(*answer) > options_.longest) {
      return absl::FailedPreconditionError("an answer that is too long to be replayed");
    }
    absl::StatusOr<Divergence> found = Replay(answer->request, model);
    if (!found.ok()) return found.status();
    answer->found = *std::move(found);
    sample.tries = 0;
  }
  return absl::OkStatus();
}

// The full cache first: it takes less time, and where there is no room for it none of the rest.
// kCancelled: it gave way; kUnavailable: it could not begin.
absl::StatusOr<Divergence> Shadow::Replay(const Request& request, const ModelPtr& model) {
  RequestOptions whole{.prompt = request.prompt, .forced = request.forced};
  // Only what is decoded is steered. What is not goes faster in chunks.
  if (request.steering.has_value()) whole.steering = request.steering->options;
  whole.force_in_chunks = !request.steering.has_value();
  std::variant<Request, Rejection> full = model->admission->Resolve(std::move(whole));
  if (const auto* rejection = std::get_if<Rejection>(&full)) {
    return absl::FailedPreconditionError(rejection->message);
  }
  const absl::StatusOr<Rows> of_full = RowsOf(std::get<Request>(std::move(full)), model);
  if (!of_full.ok()) return of_full.status();
  // As it was resolved when it came: its budget in tokens, its protection, its seed.
  Request as_it_ran = request;
  as_it_ran.max_output_tokens = static_cast<int64_t>(request.forced.size());
  const absl::StatusOr<Rows> of_arm = RowsOf(std::move(as_it_ran), model);
  if (absl::IsUnavailable(of_arm.status())) return absl::CancelledError("between the passes");
  if (!of_arm.ok()) return of_arm.status();
  if (of_full->size() != request.forced.size() || of_arm->size() != request.forced.size()) {
    return absl::InternalError("an output token has no distribution");
  }
  return Diverge(*of_full, *of_arm);
}

absl::StatusOr<Shadow::Rows> Shadow::RowsOf(Request request, const ModelPtr& model) {
  absl::StatusOr<Output> output = OutputOf(std::move(request), options_.top, model);
  if (!output.ok()) return output.status();
  return std::move(output->rows);
}

absl::StatusOr<Shadow::Output> Shadow::OutputOf(Request request, int64_t top,
                                                const ModelPtr& model) {
  request.id.clear();
  request.output = {.text = false, .top_logprobs = top};
  request.deadline = absl::InfiniteFuture();
  request.bypass_prefix_cache = true;  // whose place is for those to come
  const auto sink = std::make_shared<OutputSink>();
  {
    absl::MutexLock lock(&mu_);
    if (stopping_ || !model->engine->SubmitIdle(std::move(request), sink)) {
      return absl::UnavailableError("a live request was there first, or none is taken");
    }
    replaying_ = model;
  }
  absl::StatusOr<Output> output = sink->Await();
  absl::MutexLock lock(&mu_);
  replaying_.reset();
  return output;
}

void Shadow::Settle(Sample sample, const absl::Status& advanced) {
  if (absl::IsUnavailable(advanced)) return Put(std::move(sample));  // nothing was tried
  const bool interrupted = absl::IsCancelled(advanced);
  if (interrupted && ++sample.tries < options_.max_tries) return Put(std::move(sample));
  Tell(sample, advanced.ok() ? ShadowFate::kCompared
               : interrupted ? ShadowFate::kInterrupted
                             : ShadowFate::kFailed);
}

void Shadow::Tell(const Sample& sample, ShadowFate fate) {
  const bool compared = fate == ShadowFate::kCompared;
  const Divergence shown = compared ? *sample.shown.found : Divergence();
  if (!sample.hidden.has_value()) return observer_.OnShadow(sample.began, fate, shown);
  const Divergence hidden = compared ? *sample.hidden->found : Divergence();
  observer_.OnPair(sample.began, fate, {.shown = shown, .hidden = hidden});
}

}  // namespace epikv
