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
#include "server/call/call_scope.h"
#include "server/stream/courier.h"
#include "server/experiments/participation.h"
#include "server/experiments/shadow.h"
#include "server/messages/generation_messages.h"
#include "server/metrics/metrics.h"
#include "server/models/models.h"
#include "server/stream/outbox.h"
#include "server/base/task_thread.h"

namespace epikv {

// How many calls have not ended. Thread-safe.
class LiveCalls {
 public:
  void Add(int calls) {
    absl::MutexLock lock(&mu_);
    count_ += calls;
  }
  void AwaitNone(absl::Time deadline) {
    absl::MutexLock lock(&mu_);
    auto none = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return count_ == 0; };
    mu_.AwaitWithDeadline(absl::Condition(&none), deadline);
  }

 private:
  absl::Mutex mu_;
  int64_t count_ ABSL_GUARDED_BY(mu_) = 0;
};

struct CallTimes {
  absl::Time start, deadline, now;
};
// Why a call is cancelled at `now`: by its deadline, or by a client that has gone. A client at its
// deadline resets the stream before the server's clock says so: its deadline is the earlier one by
// the way here, and gRPC rounds a timeout up by as much as 1 %. Beyond 250 ms a cancel is the
// client's own, whatever its timeout is.
absl::Status WhyCancelled(const CallTimes& times);

struct GenerationOptions {
  OutboxLimits outbox;
  int64_t max_answer_bytes = 0;          // of an answer in one message
  int64_t most_compilations = 1024;      // of constraints of one client's requests, waiting
  Participation* experiments = nullptr;  // null: there are none
  Shadow* shadow = nullptr;              // null: nothing is replayed
};

// Takes requests, hands them to the engine and streams what comes back. Thread-safe; everything
// given to it outlives it, and it outlives its calls.
class GenerationService final
    : public v1::GenerationService::WithRawCallbackMethod_Generate<
          v1::GenerationService::WithRawCallbackMethod_GenerateOnce<
              v1::GenerationService::WithRawCallbackMethod_Score<
                  v1::GenerationService::WithRawCallbackMethod_CancelRequest<
                      v1::GenerationService::Service>>>> {
 public:
  GenerationService(const Models& models, Courier& courier, const Frontend& frontend,
                    const GenerationOptions& options);

  grpc::ServerWriteReactor<grpc::ByteBuffer>* Generate(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* in) override;
  grpc::ServerUnaryReactor* GenerateOnce(grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* in,
                                         grpc::ByteBuffer* out) override;
  grpc::ServerUnaryReactor* Score(grpc::CallbackServerContext* context, const grpc::ByteBuffer* in,
                                  grpc::ByteBuffer* out) override;
  grpc::ServerUnaryReactor* CancelRequest(grpc::CallbackServerContext* context,
                                          const grpc::ByteBuffer* in,
                                          grpc::ByteBuffer* out) override;

  // Blocks until no call is left, at most until `deadline`.
  void AwaitCalls(absl::Time deadline) { live_calls_.AwaitNone(deadline); }

 private:
  // Submits the request of `in` and starts the call, or fails it, in time on another thread. Call:
  // in generation_service.cc.
  template <typename Message, typename Call>
  void Begin(const grpc::ByteBuffer& in, Call& call);
  template <typename Message, typename Call>
  void Submit(const Message& message, Call& call);
  // Whether what its text has to be must be compiled first, which may take seconds.
  bool MustCompile(const v1::GenerateRequest& message) const;
  bool MustCompile(const v1::ScoreRequest&) const { return false; }
  template <typename Message>
  std::variant<Prepared, grpc::Status> Prepare(CallScope& scope, const Message& message,
                                               const ServedModel& model);
  // What experiments are to be told of a request if it is taken.
  struct Dealt {
    std::optional<v1::RequestBegan> began;  // it takes part in some
    std::vector<std::string> excluded;      // see Assignment
  };
  // Gives a request the options of its arms.
  std::variant<Dealt, grpc::Status> Deal(const CallScope& scope, const v1::GenerateRequest& message,
                                         const ServedModel& model, AskedRequest& asked);
  // False: it takes no part, or the call's request did before.
  bool TakePart(CallScope& scope, const Dealt& dealt);
  // entry: of the call, which gets to know how its request ended.
  OutboxHooks HooksOf(const ModelPtr& model, const Prepared& prepared, v1::AccessLogEntry& entry);
  grpc::Status RefusalOf(grpc::CallbackServerContext& context, const SubmitResult& submitted,
                         const std::string& request_id, const ServedModel& model);

  const Models& models_;
  Courier& courier_;
  const Frontend& frontend_;
  Metrics& metrics_;
  const GenerationOptions options_;
  LiveCalls live_calls_;
  TaskThread compiling_;
};

}  // namespace epikv
