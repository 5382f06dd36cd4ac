#include "server/dialect/vllm_service.h"

#include <algorithm>
#include <optional>
#include <variant>
#include <vector>

#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/base/errors.h"
#include "server/base/sha256.h"
#include "server/call/wire.h"
#include "server/dialect/tokenizer_bundle.h"
#include "server/generation/stream_call.h"
#include "smg/grpc/common/common.pb.h"

namespace epikv {

// A call of Generate. A completion ends with one message, which has all of its tokens where the
// request does not stream.
class VllmService::GenerateCall final : public StreamCall {
 public:
  GenerateCall(VllmService& service, grpc::CallbackServerContext& context)
      : StreamCall("VllmEngine/Generate", context, service.frontend(),
                   service.generation_.live_calls(),
                   [&service](const grpc::ByteBuffer& in, StreamCall& call) {
                     service.Generate(in, static_cast<GenerateCall&>(call));
                   }),
        max_bytes_(service.max_answer_bytes_) {}

  // Before it starts.
  void Ask(bool stream, uint32_t completions) {
    stream_ = stream;
    whole_.resize(stream ? 0 : completions);
  }

  void End(const absl::Status& status) override {
    constexpr absl::string_view kStreamIt = "set stream, and the answer comes in parts";
    if (too_large_) return Fail(AnswerTooLarge(bytes_, max_bytes_, kStreamIt));
    StreamCall::End(status);
  }

 private:
  std::optional<grpc::ByteBuffer> BytesOf(OutboxMessage& message) override {
    if (too_large_) return std::nullopt;
    if (const auto* delta = std::get_if<Delta>(&message)) return BytesOf(*delta);
    if (const auto* end = std::get_if<CompletionEnd>(&message)) {
      return BytesOf(end->finished, end->completion);
    }
    const auto* finished = std::get_if<Finished>(&message);
    // Of several completions each has had its end.
    if (finished == nullptr || facts().accepted.sampling().n() > 1) return std::nullopt;
    return BytesOf(*finished, 0);
  }
  std::optional<grpc::ByteBuffer> BytesOf(const Delta& delta) {
    if (delta.tokens.empty()) return std::nullopt;
    if (stream_) {
      vllm_proto::GenerateResponse response;
      *response.mutable_chunk() = ChunkOf(delta, facts().accepted.prompt_tokens());
      return Serialize(response);
    }
    vllm_proto::GenerateComplete& whole = whole_.at(delta.completion);
    const auto before = static_cast<int64_t>(whole.ByteSizeLong());
    AddTokens(delta, whole);
    bytes_ += static_cast<int64_t>(whole.ByteSizeLong()) - before;
    too_large_ = bytes_ > max_bytes_;
    if (too_large_) {
      facts().outbox->OnClientGone(absl::CancelledError("the answer is too large"));
      whole_.clear();
    }
    return std::nullopt;
  }
  grpc::ByteBuffer BytesOf(const Finished& finished, int64_t completion) {
    vllm_proto::GenerateResponse response;
    vllm_proto::GenerateComplete& complete = *response.mutable_complete();
    if (!stream_) complete.Swap(&whole_.at(completion));
    complete.MergeFrom(CompleteOf(finished, completion));
    return Serialize(response);
  }

  const int64_t max_bytes_;
  bool stream_ = false;
  std::vector<vllm_proto::GenerateComplete> whole_;  // of each completion, so far; if not streamed
  int64_t bytes_ = 0;                                // of them
  bool too_large_ = false;                           // they were given up
};

// A tokenizer on its way, part by part.
class VllmService::TokenizerCall final : public Call {
 public:
  TokenizerCall(VllmService& service, grpc::CallbackServerContext& context)
      : Call("VllmEngine/GetTokenizer", service.frontend(), context), service_(service) {}

 private:
  void OnRequest(const grpc::ByteBuffer& request) override {
    const auto asked = scope().Open<smg::grpc::common::GetTokenizerRequest>(request);
    if (const auto* refusal = std::get_if<grpc::Status>(&asked)) return End(*refusal);
    const auto found = service_.models_.Find("");
    if (const auto* refusal = std::get_if<grpc::Status>(&found)) return End(*refusal);
    bundle_ = service_.BundleOf(*std::get<ModelPtr>(found));
    SendNext();
  }
  void OnWriteDone(bool ok) override {
    Expect(absl::ZeroDuration());
    if (!ok) return End(grpc::Status(grpc::CANCELLED, "the client has gone, or reads too slowly"));
    SendNext();
  }
  void SendNext() {
    constexpr size_t kPartBytes = 64 << 10;  // each has its time to be read
    if (sent_ == bundle_->bytes.size()) return End(grpc::Status::OK);
    smg::grpc::common::GetTokenizerChunk part;
    part.set_data(bundle_->bytes.substr(sent_, kPartBytes));
    sent_ += part.data().size();
    if (sent_ == bundle_->bytes.size()) part.set_sha256(bundle_->sha256);
    message_ = Serialize(part);
    Expect(stall());
    StartWrite(&message_);
  }

  VllmService& service_;
  std::shared_ptr<const Bundle> bundle_;
  size_t sent_ = 0;           // bytes
  grpc::ByteBuffer message_;  // gRPC's until OnWriteDone
};

VllmService::VllmService(GenerationService& generation, const Models& models,
                         const Lifecycle& lifecycle, const Frontend& frontend,
                         int64_t max_answer_bytes)
    : Service(frontend, "vllm.grpc.engine"),
      generation_(generation),
      models_(models),
      lifecycle_(lifecycle),
      max_answer_bytes_(max_answer_bytes) {
  Add("VllmEngine/Generate",
      [this](grpc::CallbackServerContext& context) { return new GenerateCall(*this, context); });
  AnswerAtOnce("VllmEngine/HealthCheck", &VllmService::HealthCheck);
  AnswerAtOnce("VllmEngine/Abort", &VllmService::Abort);
  AnswerAtOnce("VllmEngine/GetModelInfo", &VllmService::GetModelInfo);
  AnswerAtOnce("VllmEngine/GetServerInfo", &VllmService::GetServerInfo);
  AnswerAtOnce("VllmEngine/GetLoads", &VllmService::GetLoads);
  Add("VllmEngine/GetTokenizer",
      [this](grpc::CallbackServerContext& context) { return new TokenizerCall(*this, context); });
}

void VllmService::Generate(const grpc::ByteBuffer& in, GenerateCall& call) {
  CallScope& scope = call.scope();
  const auto opened = scope.Open<vllm_proto::GenerateRequest>(in);
  if (const auto* refusal = std::get_if<grpc::Status>(&opened)) return call.Fail(*refusal);
  const auto& asked = std::get<vllm_proto::GenerateRequest>(opened);
  const std::variant<v1::GenerateRequest, Rejection> request = FromVllm(asked);
  if (const auto* rejection = std::get_if<Rejection>(&request)) {
    return call.Fail(scope.Reject(*rejection));
  }
  const auto& message = std::get<v1::GenerateRequest>(request);
  // No more than the most that admission lets in.
  call.Ask(asked.stream(), std::min<uint32_t>(message.sampling().n(), 16));
  generation_.Take(message, call);
}

// An error where no model has been loaded yet, or where it is not one: a router that has found no
// worker goes on looking, but one that was told of an unhealthy worker may not.
Answer<vllm_proto::HealthCheckResponse> VllmService::HealthCheck(
    const vllm_proto::HealthCheckRequest&) {
  const auto found = models_.Find("");
  if (const auto* refusal = std::get_if<grpc::Status>(&found)) return *refusal;
  vllm_proto::HealthCheckResponse response;
  response.set_healthy(lifecycle_.serving());
  response.set_message(std::string(response.healthy() ? ServerStateName(ServerState::kServing)
                                   : lifecycle_.state() == ServerState::kDraining
                                       ? ServerStateName(ServerState::kDraining)
                                       : "the engine does not answer"));
  return response;
}

Answer<vllm_proto::AbortResponse> VllmService::Abort(const vllm_proto::AbortRequest& request,
                                                     const Identity& caller) {
  const absl::Status why = absl::CancelledError("cancelled by Abort");
  for (const std::string& id : request.request_ids()) generation_.Cancel(id, "", why, caller);
  return vllm_proto::AbortResponse();
}

Answer<vllm_proto::GetModelInfoResponse> VllmService::GetModelInfo(
    const vllm_proto::GetModelInfoRequest&) {
  const auto found = models_.Find("");
  if (const auto* refusal = std::get_if<grpc::Status>(&found)) return *refusal;
  return ToVllm(*std::get<ModelPtr>(found));
}

Answer<vllm_proto::GetServerInfoResponse> VllmService::GetServerInfo(
    const vllm_proto::GetServerInfoRequest&) {
  const auto found = models_.Find("");
  if (const auto* refusal = std::get_if<grpc::Status>(&found)) return *refusal;
  const StepStats last = std::get<ModelPtr>(found)->metrics->Load().last;
  vllm_proto::GetServerInfoResponse response;
  response.set_active_requests(static_cast<uint32_t>(last.running + last.waiting));
  response.set_is_paused(lifecycle_.state() == ServerState::kDraining);
  response.set_server_type("epikvd");
  response.set_data_parallel_size(1);
  return response;
}

Answer<vllm_proto::GetLoadsResponse> VllmService::GetLoads(const vllm_proto::GetLoadsRequest&) {
  const auto found = models_.Find("");
  if (const auto* refusal = std::get_if<grpc::Status>(&found)) return *refusal;
  const ServedModel& model = *std::get<ModelPtr>(found);
  const EngineLoad engine = model.metrics->Load();
  const StepStats& last = engine.last;
  vllm_proto::GetLoadsResponse response;
  response.set_timestamp(absl::FormatTime(absl::RFC3339_full, absl::Now(), absl::UTCTimeZone()));
  response.set_version(EPIKV_VERSION);
  response.set_dp_rank_count(1);
  vllm_proto::SchedulerLoad& load = *response.add_loads();
  load.set_num_running_reqs(static_cast<int32_t>(last.running));
  load.set_num_waiting_reqs(static_cast<int32_t>(last.waiting));
  load.set_num_total_reqs(static_cast<int32_t>(last.running + last.waiting));
  load.set_num_used_tokens(
      static_cast<int32_t>(last.kv_used_bytes / model.admission->kv_bytes_per_token()));
  load.set_max_total_num_tokens(static_cast<int32_t>(model.kv_capacity_tokens()));
  load.set_token_usage(static_cast<double>(last.kv_used_bytes) /
                       static_cast<double>(model.kv_capacity_bytes));
  load.set_gen_throughput(engine.output_tokens_per_second);
  return response;
}

std::shared_ptr<const VllmService::Bundle> VllmService::BundleOf(const ServedModel& model) {
  absl::MutexLock lock(&mu_);
  if (bundle_ != nullptr && IsModel(bundled_, model.weak_from_this())) return bundle_;
  auto bundle = std::make_shared<Bundle>();
  bundle->bytes = TokenizerBundle(model);
  Sha256 digest;
  digest.Add(bundle->bytes);
  bundle->sha256 = std::string(absl::StripPrefix(digest.Name(), "sha256:"));
  bundled_ = model.weak_from_this();
  bundle_ = std::move(bundle);
  return bundle_;
}

}  // namespace epikv
