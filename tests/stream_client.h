#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "epikv/v1/generation.grpc.pb.h"
#include "tests/fake_server.h"

namespace epikv {

// One Generate from the client's side, without a thread of its own.
class StreamClient final : public grpc::ClientReadReactor<v1::GenerateResponse> {
 public:
  // reads: messages to read before it stops reading; absent: all.
  StreamClient(v1::GenerationService::Stub& stub, v1::GenerateRequest request,
               std::optional<int64_t> reads = std::nullopt,
               absl::Duration deadline = absl::InfiniteDuration())
      : request_(std::move(request)), reads_left_(reads.value_or(INT64_MAX)) {
    if (deadline != absl::InfiniteDuration()) {
      context_.set_deadline(absl::ToChronoTime(absl::Now() + deadline));
    }
    stub.async()->Generate(&context_, &request_, this);
    AddHold();  // reads start also outside of reactions
    reading_ = reads_left_-- > 0;
    if (reading_) StartRead(&message_);
    StartCall();
  }
  // Precondition: Cancel or AwaitDone has been called.
  ~StreamClient() override { AwaitDone(); }

  void Cancel() { context_.TryCancel(); }

  void ReadOn() {
    {
      absl::MutexLock lock(&mu_);
      if (done_reading_) return;
      reads_left_ = INT64_MAX;
      if (std::exchange(reading_, true)) return;
    }
    StartRead(&message_);
  }

  // The messages so far, when there are `count`, or the stream has ended.
  std::vector<v1::GenerateResponse> AwaitMessages(size_t count) {
    absl::MutexLock lock(&mu_);
    auto there = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      return messages_.size() >= count || done_reading_;
    };
    mu_.AwaitWithTimeout(absl::Condition(&there), kGenerous);
    return messages_;
  }
  // Precondition: all is read, or the call was cancelled.
  grpc::Status AwaitDone() {
    if (!std::exchange(released_, true)) RemoveHold();
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&done_));
    return status_;
  }
  grpc::ClientContext& context() { return context_; }

  // Of the messages so far.
  std::string text() {
    std::string text;
    for (const auto& message : AwaitMessages(0)) text += message.delta().text();
    return text;
  }
  std::vector<int32_t> token_ids() {
    std::vector<int32_t> ids;
    for (const auto& message : AwaitMessages(0)) {
      ids.insert(ids.end(), message.delta().token_ids().begin(), message.delta().token_ids().end());
    }
    return ids;
  }

  void OnReadDone(bool ok) override {
    {
      absl::MutexLock lock(&mu_);
      if (ok) messages_.push_back(message_);
      if (!ok) done_reading_ = true;
      // With the message, so that who has seen it sees as well whether another is being read.
      reading_ = ok && reads_left_-- > 0;
      if (!reading_) return;
    }
    StartRead(&message_);
  }
  void OnDone(const grpc::Status& status) override {
    absl::MutexLock lock(&mu_);
    status_ = status;
    done_reading_ = true;
    done_ = true;
  }

 private:
  grpc::ClientContext context_;
  const v1::GenerateRequest request_;
  v1::GenerateResponse message_;
  bool released_ = false;
  absl::Mutex mu_;
  int64_t reads_left_ ABSL_GUARDED_BY(mu_);
  bool reading_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<v1::GenerateResponse> messages_ ABSL_GUARDED_BY(mu_);
  bool done_reading_ ABSL_GUARDED_BY(mu_) = false;
  bool done_ ABSL_GUARDED_BY(mu_) = false;
  grpc::Status status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace epikv
