#include "server/model_service.h"

#include "server/generation_messages.h"
#include "server/rpc.h"

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
  proto.set_heads(manifest.num_heads);
  proto.set_kv_heads(manifest.num_kv_heads);
  proto.set_hidden_size(manifest.hidden_size);
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
  proto.set_threads(model.threads);
  proto.set_weights(manifest.weights);
  v1::ChatSupport& chat = *proto.mutable_chat();
  chat.set_refusal(model.chat.refusal());
  chat.set_system_refusal(model.chat.system_refusal());
  chat.set_thinking(model.chat.has_thinking());
  *proto.mutable_sampling() = ToProto(manifest.sampling);
  proto.mutable_sampling()->clear_seed();
  return proto;
}

grpc::ServerUnaryReactor* ModelService::ListModels(grpc::CallbackServerContext* context,
                                                   const grpc::ByteBuffer* in,
                                                   grpc::ByteBuffer* out) {
  auto list = [this](const v1::ListModelsRequest&) -> Answer<v1::ListModelsResponse> {
    v1::ListModelsResponse response;
    for (const ModelPtr& model : models_.InService()) *response.add_models() = ToProto(*model);
    return response;
  };
  return AnswerAtOnce<v1::ListModelsRequest>("ModelService/ListModels", frontend_, *context, *in,
                                             *out, list);
}

grpc::ServerUnaryReactor* ModelService::GetModel(grpc::CallbackServerContext* context,
                                                 const grpc::ByteBuffer* in,
                                                 grpc::ByteBuffer* out) {
  auto get = [this](const v1::GetModelRequest& request) -> Answer<v1::Model> {
    const auto found = models_.Find(request.name());
    if (const auto* refusal = std::get_if<grpc::Status>(&found)) return *refusal;
    return ToProto(*std::get<ModelPtr>(found));
  };
  return AnswerAtOnce<v1::GetModelRequest>("ModelService/GetModel", frontend_, *context, *in, *out,
                                           get);
}

}  // namespace epikv
