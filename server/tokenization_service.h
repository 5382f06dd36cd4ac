#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "epikv/v1/tokenization.grpc.pb.h"
#include "server/metrics.h"
#include "server/models.h"

namespace epikv {

// The served model's tokenizer. Thread-safe; everything given to it outlives it.
class TokenizationService final : public v1::TokenizationService::WithRawCallbackMethod_Tokenize<
                                      v1::TokenizationService::WithRawCallbackMethod_Detokenize<
                                          v1::TokenizationService::Service>> {
 public:
  TokenizationService(const Models& models, Metrics& metrics)
      : models_(models), metrics_(metrics) {}

  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* in, grpc::ByteBuffer* out) override;
  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* in, grpc::ByteBuffer* out) override;

 private:
  const Models& models_;
  Metrics& metrics_;
};

}  // namespace epikv
