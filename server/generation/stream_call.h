#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <utility>

#include "server/call/call_scope.h"
#include "server/call/wire.h"
#include "server/generation/call_facts.h"
#include "server/generation/live_calls.h"
#include "server/messages/generation_messages.h"
#include "server/stream/outbox.h"

namespace epikv {

// A call of Generate: writes what its outbox sends.
//
// Deletes itself in OnDone, which comes after End: the outbox, and through it the engine, reaches
// the call only before.
class StreamCall final : public grpc::ServerWriteReactor<grpc::ByteBuffer>, public StreamWriter {
 public:
  StreamCall(grpc::CallbackServerContext& context, const Frontend& frontend, LiveCalls& live)
      : live_(live), scope_("GenerationService/Generate", frontend, context) {}

  CallScope& scope() { return scope_; }
  void Start(CallFacts facts);
  void Fail(const grpc::Status& status) { Finish(scope_.Close(status)); }

  void Send(OutboxMessage message) override;
  void Abort() override { scope_.context().TryCancel(); }
  void End(const absl::Status& status) override;

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override { delete this; }

 private:
  v1::GenerateResponse ResponseOf(const Queued& queued) const;
  static v1::GenerateResponse ResponseOf(const Delta& delta);
  static v1::GenerateResponse ResponseOf(const EvictionTrace& trace);
  static v1::GenerateResponse ResponseOf(const PromptProgress& progress);
  static v1::GenerateResponse ResponseOf(const PromptLogprobs& prompt);
  v1::GenerateResponse ResponseOf(const CompletionEnd& end) const;
  v1::GenerateResponse ResponseOf(const Finished& finished) const;

  const LiveCall live_;
  CallScope scope_;
  CallFacts facts_;
  std::atomic<bool> started_ = false;  // facts_ are there
  grpc::ByteBuffer message_;           // gRPC's until OnWriteDone
};

}  // namespace epikv
