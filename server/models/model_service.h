#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "epikv/v1/model.grpc.pb.h"
#include "server/call/call_scope.h"
#include "server/models/models.h"

namespace epikv {

v1::Model ToProto(const ServedModel& model);

// What is served here. Thread-safe; everything given to it outlives it.
class ModelService final
    : public v1::ModelService::WithRawCallbackMethod_ListModels<
          v1::ModelService::WithRawCallbackMethod_GetModel<
              v1::ModelService::WithRawCallbackMethod_GetTokenizer<v1::ModelService::Service>>> {
 public:
  ModelService(const Models& models, const Frontend& frontend)
      : models_(models), frontend_(frontend) {}

  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* in, grpc::ByteBuffer* out) override;
  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* in, grpc::ByteBuffer* out) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* GetTokenizer(grpc::CallbackServerContext* context,
                                                           const grpc::ByteBuffer* in) override;

 private:
  const Models& models_;
  const Frontend& frontend_;
};

}  // namespace epikv
