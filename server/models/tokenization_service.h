#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "epikv/v1/tokenization.grpc.pb.h"
#include "server/call/call_scope.h"
#include "server/models/models.h"

namespace epikv {

// The served model's tokenizer and chat format. Thread-safe; everything given to it outlives it.
class TokenizationService final
    : public v1::TokenizationService::WithRawCallbackMethod_Tokenize<
          v1::TokenizationService::WithRawCallbackMethod_Detokenize<
              v1::TokenizationService::WithRawCallbackMethod_ApplyChatTemplate<
                  v1::TokenizationService::Service>>> {
 public:
  TokenizationService(const Models& models, const Frontend& frontend)
      : models_(models), frontend_(frontend) {}

  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* in, grpc::ByteBuffer* out) override;
  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* in, grpc::ByteBuffer* out) override;
  grpc::ServerUnaryReactor* ApplyChatTemplate(grpc::CallbackServerContext* context,
                                              const grpc::ByteBuffer* in,
                                              grpc::ByteBuffer* out) override;

 private:
  const Models& models_;
  const Frontend& frontend_;
};

}  // namespace epikv
