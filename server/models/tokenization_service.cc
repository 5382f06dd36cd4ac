#include "server/models/tokenization_service.h"

#include "absl/strings/str_cat.h"
#include "server/messages/chat_prompt.h"

namespace epikv {
namespace {

Rejection BadField(const std::string& field, absl::string_view description) {
  return {.reason = "INVALID_REQUEST",
          .message = absl::StrCat(field, ": ", description),
          .violations = {{field, std::string(description)}}};
}

}  // namespace

TokenizationService::TokenizationService(const Models& models, const Frontend& frontend,
                                         int64_t max_answer_bytes)
    : Service(frontend), models_(models), max_answer_bytes_(max_answer_bytes) {
  AnswerAtOnce("TokenizationService/Tokenize", &TokenizationService::Tokenize);
  AnswerAtOnce("TokenizationService/Detokenize", &TokenizationService::Detokenize);
  AnswerAtOnce("TokenizationService/ApplyChatTemplate", &TokenizationService::ApplyChatTemplate);
}

Answer<v1::TokenizeResponse> TokenizationService::Tokenize(const v1::TokenizeRequest& request) {
  const auto found = models_.Find(request.model());
  if (const auto* refusal = std::get_if<grpc::Status>(&found)) return *refusal;
  const ServedModel& model = *std::get<ModelPtr>(found);
  const bool add_special = !request.has_add_special_tokens() || request.add_special_tokens();
  const auto tokens = model.tokenizer->Encode(request.text(), {.add_special = add_special});
  if (!tokens.ok()) return ToGrpc(BadField("text", tokens.status().message()));
  v1::TokenizeResponse response;
  response.mutable_tokens()->mutable_ids()->Add(tokens->begin(), tokens->end());
  return response;
}

Answer<v1::DetokenizeResponse> TokenizationService::Detokenize(
    const v1::DetokenizeRequest& request) {
  const auto found = models_.Find(request.model());
  if (const auto* refusal = std::get_if<grpc::Status>(&found)) return *refusal;
  const ServedModel& model = *std::get<ModelPtr>(found);
  const auto& ids = request.tokens().ids();
  const int64_t vocab = model.admission->manifest().vocab_size;
  for (int i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && ids[i] < vocab) continue;
    Rejection rejection =
        BadField(absl::StrCat("tokens.ids[", i, "]"),
                 absl::StrCat("token id ", ids[i], " is outside the vocabulary [0, ", vocab, ")"));
    rejection.code = absl::StatusCode::kOutOfRange;
    rejection.reason = "TOKEN_RANGE";
    rejection.metadata = {{"vocab_size", absl::StrCat(vocab)}};
    return ToGrpc(rejection);
  }
  const bool skip = !request.has_skip_special_tokens() || request.skip_special_tokens();
  // Before it is made: an id of two bytes may name a token of many.
  int64_t bytes = 0;
  for (const int32_t id : ids) {
    if (skip && model.tokenizer->IsSpecial(id)) continue;
    bytes += static_cast<int64_t>(model.tokenizer->TokenBytes(id).value_or("").size());
  }
  if (bytes > max_answer_bytes_) {
    return AnswerTooLarge(bytes, max_answer_bytes_, "ask for the text of fewer tokens at once");
  }
  v1::DetokenizeResponse response;
  response.set_text(model.tokenizer->Decode({ids.data(), static_cast<size_t>(ids.size())},
                                            {.skip_special = skip}));
  return response;
}

Answer<v1::ApplyChatTemplateResponse> TokenizationService::ApplyChatTemplate(
    const v1::ApplyChatTemplateRequest& request) {
  const auto found = models_.Find(request.model());
  if (const auto* refusal = std::get_if<grpc::Status>(&found)) return *refusal;
  const ServedModel& model = *std::get<ModelPtr>(found);
  std::variant<ChatText, Rejection> text = ChatTextOf(request.chat(), model.chat);
  if (const auto* rejection = std::get_if<Rejection>(&text)) return ToGrpc(*rejection);
  v1::ApplyChatTemplateResponse response;
  auto& prompt = std::get<ChatText>(text);
  const auto tokens = model.tokenizer->Encode(prompt.text, ChatEncoding(request.chat(), prompt));
  if (!tokens.ok()) return ToGrpc(BadField("chat", tokens.status().message()));
  const auto bytes = static_cast<int64_t>(prompt.text.size() + 4 * tokens->size());
  if (bytes > max_answer_bytes_) {
    return AnswerTooLarge(bytes, max_answer_bytes_, "ask for the prompt of a shorter conversation");
  }
  response.set_text(std::move(prompt.text));
  response.mutable_tokens()->mutable_ids()->Add(tokens->begin(), tokens->end());
  return response;
}

}  // namespace epikv
