#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/string_view.h"
#include "server/base/errors.h"
#include "server/call/call.h"
#include "server/generation/call_facts.h"
#include "server/generation/live_calls.h"
#include "server/messages/generation_messages.h"
#include "server/stream/outbox.h"

namespace epikv {

// A stream's messages are smaller than its outbox; a result may be of any size.
inline constexpr absl::string_view kStreamIt = "use Generate, which streams the answer in parts";

// Where a completion's output goes: into the result, or, of several, into its own place in it.
template <typename Use>
void WithOutput(v1::GenerateResult& result, int64_t completion, const Use& use) {
  const int64_t n = result.accepted().sampling().n();
  if (n <= 1) return use(result);
  while (result.completions_size() < n) result.add_completions();
  use(*result.mutable_completions(static_cast<int>(completion)));
}
template <typename Use>
void WithOutput(v1::ScoreResponse& result, int64_t, const Use& use) {
  use(result);
}

inline void AddEnd(v1::GenerateResult& result, const v1::Finished& finished) {
  WithOutput(result, finished.completion(), [&](auto& output) {
    if constexpr (requires { output.mutable_finished(); }) *output.mutable_finished() = finished;
  });
}
inline void AddEnd(v1::ScoreResponse&, const v1::Finished&) {}  // scores have one

template <typename Output>
void AddText(Output& output, const Delta& delta) {
  output.mutable_text()->append(delta.text);
}
inline void AddText(v1::ScoreResponse& result, const Delta& delta) {
  result.mutable_greedy()->Add(delta.greedy.begin(), delta.greedy.end());
}

inline void AddPrompt(v1::GenerateResult& result, const PromptLogprobs& prompt) {
  v1::PromptLogprobs proto = ToProto(prompt);
  if (result.has_prompt_logprobs()) proto.clear_first();  // that of the first part stays
  result.mutable_prompt_logprobs()->MergeFrom(proto);
}
inline void AddPrompt(v1::ScoreResponse&, const PromptLogprobs&) {}  // cannot be asked for

// Collects the messages of a stream into one result. Lives as StreamCall does.
template <typename Result>
class CollectCall : public Call, public StreamWriter {
 public:
  using Use = std::function<void(const grpc::ByteBuffer& request, CollectCall&)>;

  // use: as StreamCall's.
  CollectCall(absl::string_view method, grpc::CallbackServerContext& context,
              const Frontend& frontend, LiveCalls& live, int64_t max_bytes, Use use)
      : Call(method, frontend, context),
        max_bytes_(max_bytes),
        live_calls_(live),
        use_(std::move(use)) {}

  void Start(CallFacts facts) {
    facts_ = std::move(facts);
    *result_.mutable_accepted() = facts_.accepted;
    started_ = true;
  }
  void Fail(const grpc::Status& status) { Call::End(status); }
  // What becomes of what its request has cached.
  virtual PacketAsked asked() const { return {}; }

  void Send(OutboxMessage message) override {
    if (!too_large_) {
      bytes_ += MessageBytes(message);
      std::visit([this](auto& part) { Collect(part); }, message);
      if (bytes_ > max_bytes_) GiveUpIfTooLarge();
    }
    facts_.outbox->OnWritten(true);
  }
  void Abort() override {}  // no write takes time
  void End(const absl::Status& status) override {
    if (too_large_) return Fail(AnswerTooLarge(bytes_, max_bytes_, kStreamIt));
    AddPushback(scope().context(), RetryAfterOf(status));
    if (!status.ok()) return Fail(ToGrpc(status));
    bytes_ = static_cast<int64_t>(result_.ByteSizeLong());
    if (bytes_ > max_bytes_) return Fail(AnswerTooLarge(bytes_, max_bytes_, kStreamIt));
    Answer();
  }

  void OnCancel() override {
    if (started_) facts_.outbox->OnClientGone(WhyCancelledNow(scope()));
  }

 protected:
  // The result is whole.
  virtual void Answer() { EndWith(result_); }
  Result& result() { return result_; }
  // What the request has left, if it was asked to; null: there was no memory for it.
  std::shared_ptr<const Packet> TakePacket() { return std::move(packet_); }

 private:
  void OnRequest(const grpc::ByteBuffer& request) override {
    live_.emplace(live_calls_);
    use_(request, *this);
  }
  // Nobody can have the answer then: what is yet to come need not be computed.
  void GiveUpIfTooLarge() {
    bytes_ = static_cast<int64_t>(result_.ByteSizeLong());
    if (bytes_ <= max_bytes_) return;
    too_large_ = true;
    result_.Clear();
    facts_.outbox->OnClientGone(absl::CancelledError("the answer is too large"));
  }
  void Collect(const Queued& queued) {
    result_.mutable_accepted()->set_queue_position(queued.position);
  }
  void Collect(const Delta& delta) {
    const v1::Delta proto = ToProto(delta);
    WithOutput(result_, delta.completion, [&](auto& output) {
      output.mutable_token_ids()->MergeFrom(proto.token_ids());
      output.mutable_logprobs()->MergeFrom(proto.logprobs());
      output.mutable_signals()->MergeFrom(proto.signals());
      output.mutable_top_logprobs()->MergeFrom(proto.top_logprobs());
      AddText(output, delta);
      if constexpr (requires { output.mutable_answer(); }) {
        if (!delta.answer.empty()) AddAnswer(delta.answer, *output.mutable_answer());
      }
    });
  }
  void Collect(const PromptProgress&) {}  // nobody sees it pass
  void Collect(const PromptLogprobs& prompt) { AddPrompt(result_, prompt); }
  void Collect(const EvictionTrace& trace) {
    WithOutput(result_, trace.completion,
               [&](auto& output) { *output.add_evictions() = ToProto(trace); });
  }
  void Collect(const CompletionEnd& end) {
    AddEnd(result_, FinishedOf(facts_.accepted, end, facts_.lanes));
  }
  void Collect(Finished& finished) {
    packet_ = std::move(finished.packet);
    *result_.mutable_summary() = SummaryOf(facts_.accepted, finished, facts_.lanes);
  }

  const int64_t max_bytes_;
  LiveCalls& live_calls_;
  std::optional<LiveCall> live_;  // once its request is there
  const Use use_;
  CallFacts facts_;
  std::atomic<bool> started_ = false;  // facts_ are there
  Result result_;
  std::shared_ptr<const Packet> packet_;
  int64_t bytes_ = 0;       // of it, about
  bool too_large_ = false;  // it was given up
};

}  // namespace epikv
