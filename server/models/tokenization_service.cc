#include "server/models/tokenization_service.h"

#include "absl/strings/str_cat.h"
#include "server/call/rpc.h"
#include "server/messages/chat_prompt.h"

namespace epikv {
namespace {

Rejection BadField(const std::string& field, absl::string_view description) {
  return {.reason = "INVALID_REQUEST",
          .message = absl::StrCat(field, ": ", description),
          .violations = {{field, std::string(description)}}};
}

}  // namespace

grpc::ServerUnaryReactor* TokenizationService::Tokenize(grpc::CallbackServerContext* context,
                                                        const grpc::ByteBuffer* in,
                                                        grpc::ByteBuffer* out) {
  auto tokenize = [this](const v1::TokenizeRequest& request) -> Answer<v1::TokenizeResponse> {
    const auto found = models_.Find(request.model());
    if (const auto* refusal = std::get_if<grpc::Status>(&found)) return *refusal;
    const ServedModel& model = *std::get<ModelPtr>(found);
    const bool add_special = !request.has_add_special_tokens() || request.add_special_tokens();
    const auto tokens = model.tokenizer->Encode(request.text(), {.add_special = add_special});
    if (!tokens.ok()) return ToGrpc(BadField("text", tokens.status().message()));
    v1::TokenizeResponse response;
    response.mutable_tokens()->mutable_ids()->Add(tokens->begin(), tokens->end());
    return response;
  };
  return AnswerAtOnce<v1::TokenizeRequest>("TokenizationService/Tokenize", frontend_, *context, *in,
                                           *out, tokenize);
}

grpc::ServerUnaryReactor* TokenizationService::Detokenize(grpc::CallbackServerContext* context,
                                                          const grpc::ByteBuffer* in,
                                                          grpc::ByteBuffer* out) {
  auto detokenize = [this](const v1::DetokenizeRequest& request) -> Answer<v1::DetokenizeResponse> {
    const auto found = models_.Find(request.model());
    if (const auto* refusal = std::get_if<grpc::Status>(&found)) return *refusal;
    const ServedModel& model = *std::get<ModelPtr>(found);
    const auto& ids = request.tokens().ids();
    const int64_t vocab = model.admission->manifest().vocab_size;
    for (int i = 0; i < ids.size(); ++i) {
      if (ids[i] >= 0 && ids[i] < vocab) continue;
      Rejection rejection = BadField(
          absl::StrCat("tokens.ids[", i, "]"),
          absl::StrCat("token id ", ids[i], " is outside the vocabulary [0, ", vocab, ")"));
      rejection.code = absl::StatusCode::kOutOfRange;
      rejection.reason = "TOKEN_RANGE";
      rejection.metadata = {{"vocab_size", absl::StrCat(vocab)}};
      return ToGrpc(rejection);
    }
    const bool skip = !request.has_skip_special_tokens() || request.skip_special_tokens();
    v1::DetokenizeResponse response;
    response.set_text(model.tokenizer->Decode({ids.data(), static_cast<size_t>(ids.size())},
                                              {.skip_special = skip}));
    return response;
  };
  return AnswerAtOnce<v1::DetokenizeRequest>("TokenizationService/Detokenize", frontend_, *context,
                                             *in, *out, detokenize);
}

grpc::ServerUnaryReactor* TokenizationService::ApplyChatTemplate(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* in, grpc::ByteBuffer* out) {
  auto apply =
      [this](const v1::ApplyChatTemplateRequest& request) -> Answer<v1::ApplyChatTemplateResponse> {
    const auto found = models_.Find(request.model());
    if (const auto* refusal = std::get_if<grpc::Status>(&found)) return *refusal;
    const ServedModel& model = *std::get<ModelPtr>(found);
    std::variant<std::string, Rejection> text = ChatText(request.chat(), model.chat);
    if (const auto* rejection = std::get_if<Rejection>(&text)) return ToGrpc(*rejection);
    v1::ApplyChatTemplateResponse response;
    response.set_text(std::get<std::string>(std::move(text)));
    const auto tokens = model.tokenizer->Encode(response.text(), {.add_special = false});
    if (!tokens.ok()) return ToGrpc(BadField("chat", tokens.status().message()));
    response.mutable_tokens()->mutable_ids()->Add(tokens->begin(), tokens->end());
    return response;
  };
  return AnswerAtOnce<v1::ApplyChatTemplateRequest>("TokenizationService/ApplyChatTemplate",
                                                    frontend_, *context, *in, *out, apply);
}

}  // namespace epikv
