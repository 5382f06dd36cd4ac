#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <variant>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "runtime/base/steady_time.h"
#include "runtime/request/request.h"

namespace epikv {

class Courier;

// The request is in the queue, behind this many others. A stream's first message.
struct Queued {
  int64_t position = 0;
};

// Of several completions this one has ended.
struct CompletionEnd {
  int64_t completion = 0;
  Finished finished;
};

// A stream is Queued, then the parts of Deltas one by one, then Finished if it ended well.
// Several completions: each part of a Delta but for the prompt's belongs to one.
using OutboxMessage = std::variant<Queued, PromptProgress, PromptLogprobs, Delta, EvictionTrace,
                                   CompletionEnd, Finished>;

// About as many bytes as it takes in memory, and on the wire.
int64_t MessageBytes(const OutboxMessage& message);

// Where an outbox's messages go. Called by one thread at a time, never while a call is under way;
// each message after the one before it was written.
class StreamWriter {
 public:
  virtual ~StreamWriter() = default;
  // Starts one write. Outbox::OnWritten follows once: on any thread, perhaps inside this call.
  virtual void Send(OutboxMessage message) = 0;
  // Breaks off the write under way, whose OnWritten(false) follows soon.
  virtual void Abort() = 0;
  // The last call: the writer may be gone when it returns.
  virtual void End(const absl::Status& status) = 0;
};

struct OutboxLimits {
  int64_t max_messages = 256;
  int64_t max_bytes = 1 << 20;
  // A client that reads nothing for this long, while a message waits, loses its request; after
  // twice this long, its stream.
  absl::Duration stall = absl::Seconds(30);
};

// How one stream wants its deltas.
struct DeltaOptions {
  bool token_ids = false;  // kept in them
  // Longest that one waits for others to join its message. Not the first one, and none behind which
  // something else waits.
  absl::Duration coalesce;
};

// How an outbox reaches the world. Called with no lock held, on any thread.
struct OutboxHooks {
  std::function<void()> wake_engine;
  // The request of this sink, if it has not ended.
  std::function<void(const RequestSink&, absl::Status)> cancel_request;
  std::function<void(absl::Duration)> was_full;  // for so long
  // What came, before anything of it is dropped. Of the engine's thread; null: nobody asks.
  std::function<void(const Delta&)> delta = nullptr;
  // The request has ended, however it did. Before the writer's End.
  std::function<void(const Finished&)> finished = [](const Finished&) {};
};

// One stream's undelivered messages, bounded in count and bytes: the sink of its request. The
// engine fills it, the courier and the write completions empty it; at most one write is under way,
// and what comes meanwhile joins the newest waiting delta.
//
// Shared by engine and stream, which end in unknown order.
class Outbox final : public RequestSink, public std::enable_shared_from_this<Outbox> {
 public:
  // `writer` lives until its End; `courier` outlives the outbox. now: the clock, for tests.
  Outbox(OutboxLimits limits, OutboxHooks hooks, DeltaOptions deltas, StreamWriter& writer,
         Courier& courier, std::function<absl::Time()> now = SteadyNow);

  // Once the request is queued. Nothing is sent before.
  void Open(Queued queued);

  // Of the engine's thread.
  bool Ready() const override;
  void OnDelta(Delta delta) override;
  void OnFinished(Finished finished) override;

  // The write under way is over; not ok: so is the stream.
  void OnWritten(bool ok);
  // The client has gone: its request ends with `status`, if it has not ended.
  void OnClientGone(absl::Status status);

  // Sends what can be sent. By the courier.
  void Deliver();
  // The same, when the courier was asked to come back.
  void DeliverLate();
  // Ends what nobody reads. By the courier, now and then.
  void CheckStall();

 private:
  struct AbortWrite {};
  struct ComeBack {  // nothing to do before
    absl::Duration delay;
  };
  struct EndStream {
    absl::Status status;
  };
  using Action = std::variant<OutboxMessage, AbortWrite, ComeBack, EndStream>;

  void Pump();
  bool StartPumping();
  std::optional<Action> NextAction();
  void Push(OutboxMessage message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DropMessages() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool WantsCourier() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Whether all that waits are deltas which others may yet join.
  bool MayWait() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The waiting delta that a new one of this completion continues; null: none.
  Delta* NewestDeltaOf(int64_t completion) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // How long the outbox was full, if it no longer is.
  std::optional<absl::Duration> UpdateFull() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const OutboxLimits limits_;
  const OutboxHooks hooks_;
  const DeltaOptions deltas_;
  StreamWriter& writer_;
  Courier& courier_;
  const std::function<absl::Time()> now_;

  mutable absl::Mutex mu_;
  std::deque<OutboxMessage> waiting_ ABSL_GUARDED_BY(mu_);
  int64_t waiting_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t writing_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  bool opened_ ABSL_GUARDED_BY(mu_) = false;
  bool has_delta_ ABSL_GUARDED_BY(mu_) = false;  // the first has come
  // When the newest waiting delta has to be sent.
  absl::Time due_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  bool comes_back_ ABSL_GUARDED_BY(mu_) = false;    // the courier, to DeliverLate
  bool with_courier_ ABSL_GUARDED_BY(mu_) = false;  // posted, not yet delivered
  bool pumping_ ABSL_GUARDED_BY(mu_) = false;       // some thread is calling the writer
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  absl::Time write_began_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Time> full_since_ ABSL_GUARDED_BY(mu_);
  bool broken_ ABSL_GUARDED_BY(mu_) = false;   // nobody reads: messages are dropped
  bool stalled_ ABSL_GUARDED_BY(mu_) = false;  // broken because the client read nothing
  bool abort_ ABSL_GUARDED_BY(mu_) = false;    // the write under way has to be broken off
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mu_);  // the request has ended
  bool ended_ ABSL_GUARDED_BY(mu_) = false;               // the writer was told
};

}  // namespace epikv
