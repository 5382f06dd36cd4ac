#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "epikv/v1/policy.grpc.pb.h"
#include "server/call/call_scope.h"
#include "server/models/models.h"

namespace epikv {

// Describes the policies of this build, with the defaults of the served model. Thread-safe;
// everything given to it outlives it.
class PolicyService final
    : public v1::PolicyService::WithRawCallbackMethod_ListPolicies<
          v1::PolicyService::WithRawCallbackMethod_GetPolicy<v1::PolicyService::Service>> {
 public:
  PolicyService(const Models& models, const Frontend& frontend)
      : models_(models), frontend_(frontend) {}

  grpc::ServerUnaryReactor* ListPolicies(grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* in,
                                         grpc::ByteBuffer* out) override;
  grpc::ServerUnaryReactor* GetPolicy(grpc::CallbackServerContext* context,
                                      const grpc::ByteBuffer* in, grpc::ByteBuffer* out) override;

 private:
  const Models& models_;
  const Frontend& frontend_;
};

}  // namespace epikv
