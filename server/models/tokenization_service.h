#pragma once

#include "epikv/v1/tokenization.grpc.pb.h"
#include "server/call/call_scope.h"
#include "server/call/service.h"
#include "server/models/models.h"

namespace epikv {

// The served model's tokenizer and chat format. Thread-safe; everything given to it outlives it.
class TokenizationService final : public Service {
 public:
  // max_answer_bytes: of one answer.
  TokenizationService(const Models& models, const Frontend& frontend, int64_t max_answer_bytes);

 private:
  Answer<v1::TokenizeResponse> Tokenize(const v1::TokenizeRequest& request);
  Answer<v1::DetokenizeResponse> Detokenize(const v1::DetokenizeRequest& request);
  Answer<v1::ApplyChatTemplateResponse> ApplyChatTemplate(
      const v1::ApplyChatTemplateRequest& request);

  const Models& models_;
  const int64_t max_answer_bytes_;
};

}  // namespace epikv
