#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <functional>
#include <optional>
#include <utility>

#include "absl/strings/string_view.h"
#include "server/call/call.h"
#include "server/call/wire.h"
#include "server/generation/call_facts.h"
#include "server/generation/live_calls.h"
#include "server/messages/generation_messages.h"
#include "server/stream/outbox.h"

namespace epikv {

// A call that streams: writes what its outbox sends, in the words of epikv.v1 unless a class that
// derives from it has others. It is gone soon after its end: the outbox, and through it the engine,
// reaches the call only before.
class StreamCall : public Call, public StreamWriter {
 public:
  using Use = std::function<void(const grpc::ByteBuffer& request, StreamCall&)>;

  // method: as CallScope has it. use: starts or fails the call once its request is there.
  StreamCall(absl::string_view method, grpc::CallbackServerContext& context,
             const Frontend& frontend, LiveCalls& live, Use use)
      : Call(method, frontend, context), live_calls_(live), use_(std::move(use)) {}

  void Start(CallFacts facts);
  void Fail(const grpc::Status& status) { Call::End(status); }
  static PacketAsked asked() { return {}; }

  void Send(OutboxMessage message) override;
  void Abort() override { scope().context().TryCancel(); }
  void End(const absl::Status& status) override;

  void OnWriteDone(bool ok) override;
  void OnCancel() override;

 protected:
  // What the client is sent of a message; absent: nothing.
  virtual std::optional<grpc::ByteBuffer> BytesOf(OutboxMessage& message);
  // Once the call has started.
  const CallFacts& facts() const { return facts_; }

 private:
  void OnRequest(const grpc::ByteBuffer& request) override {
    live_.emplace(live_calls_);
    use_(request, *this);
  }
  v1::GenerateResponse ResponseOf(const Queued& queued) const;
  static v1::GenerateResponse ResponseOf(const Delta& delta);
  static v1::GenerateResponse ResponseOf(const EvictionTrace& trace);
  static v1::GenerateResponse ResponseOf(const PromptProgress& progress);
  static v1::GenerateResponse ResponseOf(const PromptLogprobs& prompt);
  v1::GenerateResponse ResponseOf(const CompletionEnd& end) const;
  v1::GenerateResponse ResponseOf(const Finished& finished) const;

  LiveCalls& live_calls_;
  std::optional<LiveCall> live_;  // once its request is there
  const Use use_;
  CallFacts facts_;
  std::atomic<bool> started_ = false;  // facts_ are there
  grpc::ByteBuffer message_;           // gRPC's until OnWriteDone
};

}  // namespace epikv
