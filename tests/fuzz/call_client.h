#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "tests/fuzz/calls.h"
#include "tests/fuzz/require.h"

namespace epikv {

// A call of any kind, and all that came back.
class ClientCall final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  ClientCall(const std::shared_ptr<grpc::Channel>& channel, const FuzzCall& call) : stub_(channel) {
    const auto message = call.wire ? nullptr : call.ParseBody();
    grpc::Slice bytes(message != nullptr ? message->SerializeAsString() : call.body);
    request_ = grpc::ByteBuffer(&bytes, 1);
    stub_.PrepareBidiStreamingCall(&context_, call.path(), {}, this);
    StartWriteLast(&request_, {});
    StartRead(&message_);
    StartCall();
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    std::vector<grpc::Slice> slices;
    Require(message_.Dump(&slices).ok(), "a message has bytes");
    messages_.emplace_back();
    for (const grpc::Slice& slice : slices) messages_.back().append(AsText(slice));
    StartRead(&message_);
  }
  void OnDone(const grpc::Status& status) override {
    absl::MutexLock lock(&mu_);
    status_ = status;
  }
  grpc::Status Await() {
    absl::MutexLock lock(&mu_);
    auto done = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return status_.has_value(); };
    Require(mu_.AwaitWithTimeout(absl::Condition(&done), absl::Seconds(120)), "a call ends");
    return *status_;
  }
  // Once it has ended.
  const std::vector<std::string>& messages() const { return messages_; }

 private:
  static std::string AsText(const grpc::Slice& slice) {
    return {reinterpret_cast<const char*>(slice.begin()), slice.size()};
  }

  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer request_, message_;
  std::vector<std::string> messages_;
  absl::Mutex mu_;
  std::optional<grpc::Status> status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace epikv
