#include "server/models/model_service.h"

#include <memory>
#include <string>
#include <utility>
#include <variant>

#include "server/call/call.h"
#include "server/call/wire.h"
#include "server/messages/generation_messages.h"

namespace epikv {
namespace {

v1::Calibration ToProto(const Calibration& calibration) {
  v1::Calibration proto;
  proto.set_policy(calibration.policy);
  proto.set_layer_a(calibration.layer_a);
  proto.set_layer_b(calibration.layer_b);
  proto.set_sign(static_cast<int32_t>(calibration.sign));
  proto.set_window(calibration.window);
  proto.set_confirmed(calibration.confirmed);
  return proto;
}

// A tokenizer.json on its way, part by part.
class TokenizerCall final : public Call {
 public:
  TokenizerCall(const Models& models, const Frontend& frontend,
                grpc::CallbackServerContext& context)
      : Call("ModelService/GetTokenizer", frontend, context), models_(models) {}

 private:
  void OnRequest(const grpc::ByteBuffer& request) override {
    const auto asked = scope().Open<v1::GetTokenizerRequest>(request);
    if (const auto* refusal = std::get_if<grpc::Status>(&asked)) return End(*refusal);
    const auto found = models_.Find(std::get<v1::GetTokenizerRequest>(asked).model());
    if (const auto* refusal = std::get_if<grpc::Status>(&found)) return End(*refusal);
    tokenizer_ = std::get<ModelPtr>(found)->tokenizer;
    SendNext();
  }
  void OnWriteDone(bool ok) override {
    Expect(absl::ZeroDuration());
    if (!ok) return End(grpc::Status(grpc::CANCELLED, "the client has gone, or reads too slowly"));
    SendNext();
  }
  void SendNext() {
    constexpr size_t kPartBytes = 64 << 10;  // each has its time to be read
    const std::string& json = tokenizer_->json();
    if (sent_ == json.size()) return End(grpc::Status::OK);
    v1::TokenizerPart part;
    part.set_json(json.substr(sent_, kPartBytes));
    sent_ += part.json().size();
    message_ = Serialize(part);
    Expect(stall());
    StartWrite(&message_);
  }

  const Models& models_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  size_t sent_ = 0;           // bytes
  grpc::ByteBuffer message_;  // gRPC's until OnWriteDone
};

}  // namespace

v1::Model ToProto(const ServedModel& model) {
  const Manifest& manifest = model.admission->manifest();
  v1::Model proto;
  proto.set_name(model.name);
  proto.set_architecture(manifest.architecture);
  proto.set_dtype(std::string(DTypeName(manifest.dtype)));
  proto.set_vocab_size(manifest.vocab_size);
  proto.set_context_length(manifest.context_length);
  proto.set_layers(manifest.num_layers());
  proto.set_heads(manifest.num_heads * model.ranks);
  proto.set_kv_heads(manifest.num_kv_heads * model.ranks);
  proto.set_hidden_size(manifest.hidden_size);
  proto.set_kv_dtype(std::string(model.admission->kv_format().name()));
  proto.set_kv_bytes_per_token(model.admission->kv_bytes_per_token());
  proto.set_kv_capacity_tokens(model.kv_capacity_tokens());
  proto.set_kv_capacity_bytes(model.kv_capacity_bytes);
  proto.set_default_policy(model.admission->DefaultPolicy());
  if (manifest.calibration.has_value()) {
    *proto.mutable_calibration() = ToProto(*manifest.calibration);
  }
  if (manifest.bos_token.has_value()) proto.set_bos_token_id(*manifest.bos_token);
  proto.mutable_eos_token_ids()->Add(manifest.eos_tokens.begin(), manifest.eos_tokens.end());
  proto.set_deterministic(model.deterministic);
  proto.set_decode_kernel(model.decode_kernel);
  proto.set_prefill_kernel(model.prefill_kernel);
  proto.set_threads(model.threads);
  proto.set_device(model.device);
  proto.set_weights(manifest.weights);
  proto.set_quantization(manifest.quantization);
  proto.set_draft_model(model.draft_model);
  proto.set_tensor_parallel(static_cast<uint32_t>(model.ranks));
  v1::ChatSupport& chat = *proto.mutable_chat();
  chat.set_refusal(model.chat.refusal());
  chat.set_system_refusal(model.chat.system_refusal());
  chat.set_thinking(model.chat.has_thinking());
  chat.set_tools_refusal(model.chat.tools_refusal());
  chat.set_several_calls(model.chat.tools_refusal().empty() && model.chat.calls().several);
  *proto.mutable_sampling() = ToProto(manifest.sampling);
  proto.mutable_sampling()->clear_seed();
  return proto;
}

ModelService::ModelService(const Models& models, const Frontend& frontend)
    : Service(frontend), models_(models) {
  AnswerAtOnce("ModelService/ListModels", &ModelService::ListModels);
  AnswerAtOnce("ModelService/GetModel", &ModelService::GetModel);
  Add("ModelService/GetTokenizer", [this](grpc::CallbackServerContext& context) {
    return new TokenizerCall(models_, this->frontend(), context);
  });
}

Answer<v1::ListModelsResponse> ModelService::ListModels(const v1::ListModelsRequest&) {
  v1::ListModelsResponse response;
  for (const ModelPtr& model : models_.InService()) *response.add_models() = ToProto(*model);
  return response;
}

Answer<v1::Model> ModelService::GetModel(const v1::GetModelRequest& request) {
  const auto found = models_.Find(request.name());
  if (const auto* refusal = std::get_if<grpc::Status>(&found)) return *refusal;
  return ToProto(*std::get<ModelPtr>(found));
}

}  // namespace epikv
