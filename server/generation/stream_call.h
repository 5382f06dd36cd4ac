#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <functional>
#include <optional>
#include <utility>

#include "server/call/call.h"
#include "server/call/wire.h"
#include "server/generation/call_facts.h"
#include "server/generation/live_calls.h"
#include "server/messages/generation_messages.h"
#include "server/stream/outbox.h"

namespace epikv {

// A call of Generate: writes what its outbox sends. It is gone soon after its end: the outbox, and
// through it the engine, reaches the call only before.
class StreamCall final : public Call, public StreamWriter {
 public:
  using Use = std::function<void(const grpc::ByteBuffer& request, StreamCall&)>;

  // use: starts or fails the call once its request is there.
  StreamCall(grpc::CallbackServerContext& context, const Frontend& frontend, LiveCalls& live,
             Use use)
      : Call("GenerationService/Generate", frontend, context),
        live_calls_(live),
        use_(std::move(use)) {}

  void Start(CallFacts facts);
  void Fail(const grpc::Status& status) { Call::End(status); }
  static PacketAsked asked() { return {}; }

  void Send(OutboxMessage message) override;
  void Abort() override { scope().context().TryCancel(); }
  void End(const absl::Status& status) override;

  void OnWriteDone(bool ok) override;
  void OnCancel() override;

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
