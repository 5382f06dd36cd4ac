#include "server/call/call.h"

#include <grpc/support/time.h>
#include <grpcpp/server_context.h>

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/base/task_thread.h"
#include "server/call/wire.h"

namespace epikv {
namespace {

// From its first byte to its last.
constexpr absl::Duration kMostToRead = absl::Seconds(60);
// What gRPC's two threads may be kept with. Health waits behind it.
constexpr size_t kShortRequestBytes = 16 << 10;
// An answer that is longer counts as one that waits to be read.
constexpr int64_t kShortAnswerBytes = 64 << 10;
// Of a long answer, a second: who takes less does not read.
constexpr int64_t kLeastReadBytes = 64 << 10;
constexpr absl::Duration kLongRetryDelay = absl::Seconds(1);

}  // namespace

// Shared with gRPC's timer, which may be late.
class Call::Timeout {
 public:
  explicit Timeout(grpc::CallbackServerContext& context) : context_(&context) {}

  void OnTime() {
    absl::MutexLock lock(&mu_);
    if (context_ != nullptr) context_->TryCancel();
  }
  void Forget() {
    absl::MutexLock lock(&mu_);
    context_ = nullptr;
  }

 private:
  absl::Mutex mu_;
  grpc::CallbackServerContext* context_ ABSL_GUARDED_BY(mu_);
};

Call::Call(absl::string_view method, const Frontend& frontend, grpc::CallbackServerContext& context)
    : frontend_(frontend), scope_(method, frontend, context) {}

Call::~Call() { Expect(absl::ZeroDuration()); }

void Call::Expect(absl::Duration most) {
  if (timeout_ != nullptr) timeout_->Forget();
  timeout_.reset();
  alarm_.reset();
  if (most <= absl::ZeroDuration()) return;
  timeout_ = std::make_shared<Timeout>(scope_.context());
  alarm_ = std::make_unique<grpc::Alarm>();
  const gpr_timespec at =
      gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                   gpr_time_from_millis(absl::ToInt64Milliseconds(most), GPR_TIMESPAN));
  alarm_->Set(at, [timeout = timeout_](bool on_time) {
    if (on_time) timeout->OnTime();
  });
}

void Call::Begin() {
  if (const auto refusal = scope_.Admit()) return End(*refusal);
  Expect(kMostToRead);
  frontend_.connections.OnReading(scope_.context().peer());
  StartRead(&request_);
}

void Call::OnReadDone(bool ok) {
  Expect(absl::ZeroDuration());
  grpc::ByteBuffer request;
  request.Swap(&request_);  // the call may be gone when it has been handed over
  frontend_.connections.OnRead(scope_.context().peer(), static_cast<int64_t>(request.Length()));
  if (ok) return HandOver(request);
  if (scope_.context().IsCancelled()) {
    return End(grpc::Status(grpc::CANCELLED, "the client has gone, or took too long to send"));
  }
  End(scope_.Reject({.reason = std::string(kMalformed), .message = "the call has no request"}));
}

void Call::HandOver(const grpc::ByteBuffer& request) {
  scope_.OnRead();
  const auto bytes = static_cast<int64_t>(request.Length());
  if (request.Length() <= kShortRequestBytes) return OnRequest(request);
  const std::string& client = scope_.caller().name;
  // Alone, a request may be over the limit: it would be refused for ever.
  const int64_t waiting = frontend_.long_requests.Weighs(client);
  if (waiting > 0 && waiting + bytes > kMostClientBytes) {
    frontend_.metrics.OnRejected(kQueueFull);
    return End(Exhausted("long requests",
                         absl::StrCat("more than ", kMostClientBytes,
                                      " bytes of your long requests wait to be read"),
                         kLongRetryDelay));
  }
  frontend_.long_requests.Post(client, bytes, [this, request] { OnRequest(request); });
}

void Call::EndWith(const google::protobuf::Message& answer) {
  answer_ = Serialize(answer);
  const auto bytes = static_cast<int64_t>(answer_.Length());
  if (bytes > kShortAnswerBytes) {
    if (!frontend_.answers.Take(scope_.caller().name, bytes)) {
      answer_.Clear();
      frontend_.metrics.OnRejected(kQueueFull);
      return End(Exhausted("answers",
                           absl::StrCat("more than ", frontend_.answers.most(),
                                        " bytes of answers to you wait to be read"),
                           kLongRetryDelay));
    }
    answer_bytes_ = bytes;
    Expect(stall() + absl::Seconds(bytes / kLeastReadBytes));
  }
  StartWriteAndFinish(&answer_, grpc::WriteOptions(), scope_.Close(grpc::Status::OK));
}

void Call::OnDone() {
  if (answer_bytes_ > 0) frontend_.answers.Give(scope_.caller().name, answer_bytes_);
  delete this;
}

}  // namespace epikv
