#include "server/stream/outbox.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/base/reason.h"
#include "server/base/errors.h"
#include "server/stream/courier.h"

namespace epikv {
namespace {

template <typename T>
void Join(std::vector<T>& to, std::vector<T>&& from) {
  to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

void Join(Delta& to, Delta&& from) {
  to.text += from.text;
  to.answer.Append(std::move(from.answer));
  Join(to.tokens, std::move(from.tokens));
  Join(to.logprobs, std::move(from.logprobs));
  to.greedy.insert(to.greedy.end(), from.greedy.begin(), from.greedy.end());
  Join(to.residual_steps, std::move(from.residual_steps));
  Join(to.top_logprobs, std::move(from.top_logprobs));
}

bool IsEmpty(const Delta& delta) {
  return delta.text.empty() && delta.answer.empty() && delta.tokens.empty() &&
         delta.logprobs.empty() && delta.greedy.empty() && delta.residual_steps.empty() &&
         delta.top_logprobs.empty();
}

size_t BytesOf(const std::vector<std::vector<TokenLogprob>>& top) {
  size_t bytes = 0;
  for (const auto& tokens : top) bytes += 8 + 8 * tokens.size();
  return bytes;
}

size_t BytesOf(const AnswerDelta& answer) {
  size_t bytes = answer.reasoning.size() + answer.content.size();
  for (const CallDelta& call : answer.calls) {
    bytes += 16 + call.id.size() + call.name.size() + call.arguments.size();
  }
  return bytes;
}

struct SizeOf {
  int64_t operator()(const Queued&) const { return 64; }
  int64_t operator()(const Finished&) const { return 256; }
  int64_t operator()(const CompletionEnd& end) const {
    return static_cast<int64_t>(256 + 4 * end.finished.kv.kept.size());
  }
  int64_t operator()(const PromptProgress&) const { return 16; }
  int64_t operator()(const PromptLogprobs& prompt) const {
    return static_cast<int64_t>(8 + 8 * prompt.tokens.size() + BytesOf(prompt.top));
  }
  int64_t operator()(const Delta& delta) const {
    size_t bytes = delta.text.size() + BytesOf(delta.answer) +
                   4 * (delta.tokens.size() + delta.logprobs.size()) + delta.greedy.size() +
                   BytesOf(delta.top_logprobs);
    for (const auto& row : delta.residual_steps) bytes += 8 + 4 * row.size();
    return static_cast<int64_t>(bytes);
  }
  int64_t operator()(const EvictionTrace& trace) const {
    size_t bytes = 8;
    for (const auto& victims : trace.victims) bytes += 8 + 4 * victims.index.size();
    return static_cast<int64_t>(bytes);
  }
};

absl::Status SlowReader(absl::Duration stall) {
  return WithReason(
      absl::ResourceExhaustedError(absl::StrCat(
          "the client read nothing for ", absl::FormatDuration(stall), " while messages waited")),
      kSlowReader);
}

}  // namespace

int64_t MessageBytes(const OutboxMessage& message) { return std::visit(SizeOf(), message); }

Outbox::Outbox(OutboxLimits limits, OutboxHooks hooks, DeltaOptions deltas, StreamWriter& writer,
               Courier& courier, std::function<absl::Time()> now)
    : limits_(limits),
      hooks_(std::move(hooks)),
      deltas_(deltas),
      writer_(writer),
      courier_(courier),
      now_(std::move(now)) {}

void Outbox::Open(Queued queued) {
  courier_.Watch(weak_from_this());
  {
    absl::MutexLock lock(&mu_);
    waiting_.push_front(queued);
    waiting_bytes_ += SizeOf()(queued);
    opened_ = true;
  }
  Pump();
}

bool Outbox::Ready() const {
  absl::MutexLock lock(&mu_);
  return !full_since_.has_value();
}

void Outbox::OnDelta(Delta delta) {
  if (hooks_.delta) hooks_.delta(delta);
  std::vector<EvictionTrace> traces = std::exchange(delta.evictions, {});
  const std::optional<PromptProgress> progress = std::exchange(delta.progress, {});
  PromptLogprobs prompt = std::exchange(delta.prompt, {});
  std::optional<Finished> ended = std::exchange(delta.ended, {});
  const int64_t completion = delta.completion;
  if (!deltas_.token_ids) delta.tokens.clear();
  bool post;
  {
    absl::MutexLock lock(&mu_);
    if (broken_) return;
    if (progress.has_value()) Push(*progress);
    if (!prompt.tokens.empty()) Push(std::move(prompt));
    if (!IsEmpty(delta)) Push(std::move(delta));
    for (EvictionTrace& trace : traces) Push(std::move(trace));
    if (ended.has_value()) Push(CompletionEnd{completion, *std::move(ended)});
    UpdateFull();
    post = WantsCourier();
  }
  if (post) courier_.Post(shared_from_this());
}

void Outbox::OnFinished(Finished finished) {
  hooks_.finished(finished);
  bool post;
  {
    absl::MutexLock lock(&mu_);
    end_ = stalled_ ? SlowReader(limits_.stall) : finished.status;
    if (end_->ok() && !broken_) Push(std::move(finished));
    post = WantsCourier();
  }
  if (post) courier_.Post(shared_from_this());
}

void Outbox::OnWritten(bool ok) {
  bool gone;
  std::optional<absl::Duration> was_full;
  {
    absl::MutexLock lock(&mu_);
    writing_ = false;
    writing_bytes_ = 0;
    if (!ok) DropMessages();
    gone = !ok && !end_.has_value();
    was_full = UpdateFull();
  }
  if (gone) hooks_.cancel_request(*this, absl::CancelledError("the client has gone"));
  if (was_full.has_value()) {
    hooks_.was_full(*was_full);
    hooks_.wake_engine();
  }
  Pump();
}

void Outbox::OnClientGone(absl::Status status) {
  bool live;
  {
    absl::MutexLock lock(&mu_);
    DropMessages();
    live = !end_.has_value();
  }
  if (live) hooks_.cancel_request(*this, std::move(status));
  Pump();
}

void Outbox::CheckStall() {
  bool cancel = false;
  {
    absl::MutexLock lock(&mu_);
    if (!writing_) return;
    const absl::Duration stalled = now_() - write_began_;
    if (stalled < limits_.stall) return;
    if (!stalled_) {
      stalled_ = true;
      DropMessages();
      cancel = !end_.has_value();
      // It ended in time, but what it said can no longer be delivered.
      if (end_.has_value()) end_ = SlowReader(limits_.stall);
    }
    if (stalled >= 2 * limits_.stall) abort_ = true;
  }
  if (cancel) hooks_.cancel_request(*this, SlowReader(limits_.stall));
  Pump();
}

void Outbox::Deliver() {
  {
    absl::MutexLock lock(&mu_);
    with_courier_ = false;
  }
  Pump();
}

void Outbox::DeliverLate() {
  {
    absl::MutexLock lock(&mu_);
    comes_back_ = false;
  }
  Pump();
}

// One thread at a time calls the writer: who finds another at it leaves, and that one looks again
// before it stops. So a completion inside Send does not recurse, and End is the last call.
void Outbox::Pump() {
  const auto self = shared_from_this();  // End may drop the last other owner
  if (!StartPumping()) return;
  while (std::optional<Action> action = NextAction()) {
    if (auto* message = std::get_if<OutboxMessage>(&*action)) writer_.Send(std::move(*message));
    if (std::holds_alternative<AbortWrite>(*action)) writer_.Abort();
    if (auto* later = std::get_if<ComeBack>(&*action)) courier_.ComeBack(self, later->delay);
    if (auto* end = std::get_if<EndStream>(&*action)) writer_.End(end->status);
  }
}

bool Outbox::StartPumping() {
  absl::MutexLock lock(&mu_);
  return !std::exchange(pumping_, true);
}

std::optional<Outbox::Action> Outbox::NextAction() {
  absl::MutexLock lock(&mu_);
  if (opened_ && !ended_) {
    if (writing_ && std::exchange(abort_, false)) return AbortWrite{};
    if (!writing_ && MayWait()) {
      if (!std::exchange(comes_back_, true)) return ComeBack{due_ - now_()};
    } else if (!writing_ && !waiting_.empty()) {
      OutboxMessage message = std::move(waiting_.front());
      waiting_.pop_front();
      writing_ = true;
      write_began_ = now_();
      writing_bytes_ = MessageBytes(message);
      waiting_bytes_ -= writing_bytes_;
      return message;
    }
    if (!writing_ && end_.has_value()) {
      ended_ = true;
      return EndStream{*end_};
    }
  }
  pumping_ = false;
  return std::nullopt;
}

void Outbox::Push(OutboxMessage message) {
  waiting_bytes_ += MessageBytes(message);
  if (Delta* delta = std::get_if<Delta>(&message)) {
    if (Delta* newest = NewestDeltaOf(delta->completion)) return Join(*newest, std::move(*delta));
    const bool first = !std::exchange(has_delta_, true);
    if (!first && waiting_.empty()) due_ = now_() + deltas_.coalesce;
  }
  waiting_.push_back(std::move(message));
}

// What lies between belongs to other completions, of which the order says nothing.
Delta* Outbox::NewestDeltaOf(int64_t completion) {
  for (auto message = waiting_.rbegin(); message != waiting_.rend(); ++message) {
    if (Delta* delta = std::get_if<Delta>(&*message)) {
      if (delta->completion == completion) return delta;
    } else if (const auto* trace = std::get_if<EvictionTrace>(&*message)) {
      if (trace->completion == completion) return nullptr;
    } else if (!std::holds_alternative<CompletionEnd>(*message)) {
      return nullptr;
    }
  }
  return nullptr;
}

bool Outbox::MayWait() const {
  auto is_delta = [](const OutboxMessage& m) { return std::holds_alternative<Delta>(m); };
  return !waiting_.empty() && !end_.has_value() && !full_since_.has_value() && now_() < due_ &&
         std::all_of(waiting_.begin(), waiting_.end(), is_delta);
}

void Outbox::DropMessages() {
  broken_ = true;
  waiting_.clear();
  waiting_bytes_ = 0;
}

bool Outbox::WantsCourier() {
  if (!opened_ || writing_ || pumping_ || with_courier_) return false;
  if (comes_back_ && MayWait()) return false;
  with_courier_ = true;
  return true;
}

// Full at a limit; ready again at half of it, so that the engine is not woken for every message.
std::optional<absl::Duration> Outbox::UpdateFull() {
  const int64_t messages = static_cast<int64_t>(waiting_.size()) + (writing_ ? 1 : 0);
  const int64_t bytes = waiting_bytes_ + writing_bytes_;
  if (!full_since_.has_value()) {
    if (messages >= limits_.max_messages || bytes >= limits_.max_bytes) full_since_ = now_();
    return std::nullopt;
  }
  if (messages > limits_.max_messages / 2 || bytes > limits_.max_bytes / 2) return std::nullopt;
  return now_() - *std::exchange(full_since_, std::nullopt);
}

}  // namespace epikv
