#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "epikv/v1/generation.grpc.pb.h"
#include "server/base/task_thread.h"
#include "server/call/call_scope.h"
#include "server/call/service.h"
#include "server/experiments/participation.h"
#include "server/experiments/shadow.h"
#include "server/generation/live_calls.h"
#include "server/generation/packet_call.h"
#include "server/generation/request_preparer.h"
#include "server/generation/stream_call.h"
#include "server/messages/generation_messages.h"
#include "server/metrics/metrics.h"
#include "server/models/models.h"
#include "server/packets/packet_store.h"
#include "server/sessions/sessions.h"
#include "server/stream/courier.h"
#include "server/stream/outbox.h"

namespace epikv {

struct GenerationOptions {
  OutboxLimits outbox;
  int64_t max_answer_bytes = 0;          // of an answer in one message
  int64_t most_compilations = 1024;      // of constraints of one client's requests, waiting
  Participation* experiments = nullptr;  // null: there are none
  Shadow* shadow = nullptr;              // null: nothing is replayed
  bool shared_prefixes = false;          // see RequestPreparer
  PacketStore* packets = nullptr;        // not null
  Sessions* sessions = nullptr;          // null: there are none
};

// Takes requests, hands them to the engine and streams what comes back. Thread-safe; everything
// given to it outlives it, and it outlives its calls.
class GenerationService final : public Service {
 public:
  GenerationService(const Models& models, Courier& courier, const Frontend& frontend,
                    const GenerationOptions& options);

  // Blocks until no call is left, at most until `deadline` (of SteadyNow).
  void AwaitCalls(absl::Time deadline) { live_calls_.AwaitNone(deadline); }

  // For services that speak other dialects. Their calls count among those of this one.
  LiveCalls& live_calls() { return live_calls_; }
  // What a client asked for in another dialect: submits it and starts the call, or fails it.
  // Precondition: the caller was admitted.
  void Take(const v1::GenerateRequest& message, StreamCall& call);
  // Ends the request of this id with `why`, if it is the caller's own or he is an operator. model:
  // empty for any. False: there is none.
  bool Cancel(const std::string& id, const std::string& model, const absl::Status& why,
              const Identity& caller);

 private:
  Answer<v1::CancelRequestResponse> CancelRequest(const v1::CancelRequestRequest& request,
                                                  const Identity& caller);

  // A method whose result is one message.
  template <typename Message, typename Result>
  void AddCollected(absl::string_view method);
  // Submits the request of `in` and starts the call, or fails it, in time on another thread. Call:
  // StreamCall or CollectCall.
  template <typename Message, typename Call>
  void BeginRequest(const grpc::ByteBuffer& in, Call& call);
  void BeginPacket(const grpc::ByteBuffer& in, PacketCall& call);
  // may_wait: on a thread that has the seconds which a constraint or the file of a packet may take;
  // gRPC has two for all calls.
  template <typename Message, typename Call>
  void Submit(const Message& message, Call& call, bool may_wait);
  // The same on the thread that prepares, or fails the call: too much of its client waits there.
  template <typename Message, typename Call>
  void SubmitOncePrepared(const Message& message, Call& call);
  // Memory for the packet that a request leaves; or the call has failed.
  bool MakeRoom(const ServedModel& model, const Request& request, PacketCall& call);
  // entry: of the call, which gets to know how its request ended.
  OutboxHooks HooksOf(const ModelPtr& model, const Prepared& prepared, v1::AccessLogEntry& entry);
  grpc::Status RefusalOf(CallScope& scope, const SubmitResult& submitted,
                         const std::string& request_id, const ServedModel& model);

  const Models& models_;
  Courier& courier_;
  Metrics& metrics_;
  const GenerationOptions options_;
  RequestPreparer preparer_;
  LiveCalls live_calls_;
  TaskThread preparing_, keeping_;
};

}  // namespace epikv
