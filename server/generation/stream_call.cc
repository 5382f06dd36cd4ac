#include "server/generation/stream_call.h"

#include <variant>

#include "server/base/errors.h"

namespace epikv {

void StreamCall::Start(CallFacts facts) {
  facts_ = std::move(facts);
  started_ = true;
}

void StreamCall::Send(OutboxMessage message) {
  std::optional<grpc::ByteBuffer> bytes = BytesOf(message);
  if (!bytes.has_value()) return facts_.outbox->OnWritten(true);
  message_ = *std::move(bytes);
  StartWrite(&message_);
}

std::optional<grpc::ByteBuffer> StreamCall::BytesOf(OutboxMessage& message) {
  return Serialize(std::visit([this](auto& part) { return ResponseOf(part); }, message));
}

void StreamCall::End(const absl::Status& status) {
  AddPushback(scope().context(), RetryAfterOf(status));
  Fail(ToGrpc(status));
}

void StreamCall::OnWriteDone(bool ok) {
  // It may come before OnCancel, and the outbox cannot know why it failed.
  if (!ok) facts_.outbox->OnClientGone(WhyCancelledNow(scope()));
  facts_.outbox->OnWritten(ok);
}

void StreamCall::OnCancel() {
  if (started_) facts_.outbox->OnClientGone(WhyCancelledNow(scope()));
}

v1::GenerateResponse StreamCall::ResponseOf(const Queued& queued) const {
  v1::GenerateResponse response;
  *response.mutable_accepted() = facts_.accepted;
  response.mutable_accepted()->set_queue_position(queued.position);
  return response;
}

v1::GenerateResponse StreamCall::ResponseOf(const Delta& delta) {
  v1::GenerateResponse response;
  *response.mutable_delta() = ToProto(delta);
  return response;
}

v1::GenerateResponse StreamCall::ResponseOf(const EvictionTrace& trace) {
  v1::GenerateResponse response;
  *response.mutable_eviction() = ToProto(trace);
  return response;
}

v1::GenerateResponse StreamCall::ResponseOf(const PromptProgress& progress) {
  v1::GenerateResponse response;
  *response.mutable_progress() = ToProto(progress);
  return response;
}

v1::GenerateResponse StreamCall::ResponseOf(const PromptLogprobs& prompt) {
  v1::GenerateResponse response;
  *response.mutable_prompt_logprobs() = ToProto(prompt);
  return response;
}

v1::GenerateResponse StreamCall::ResponseOf(const CompletionEnd& end) const {
  v1::GenerateResponse response;
  *response.mutable_finished() = FinishedOf(facts_.accepted, end, facts_.lanes);
  return response;
}

v1::GenerateResponse StreamCall::ResponseOf(const Finished& finished) const {
  v1::GenerateResponse response;
  *response.mutable_summary() = SummaryOf(facts_.accepted, finished, facts_.lanes);
  return response;
}

}  // namespace epikv
