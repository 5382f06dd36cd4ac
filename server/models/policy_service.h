#pragma once

#include "epikv/v1/policy.grpc.pb.h"
#include "server/call/call_scope.h"
#include "server/call/service.h"
#include "server/models/models.h"

namespace epikv {

// Describes the policies of this build, with the defaults of the served model. Thread-safe;
// everything given to it outlives it.
class PolicyService final : public Service {
 public:
  PolicyService(const Models& models, const Frontend& frontend);

 private:
  Answer<v1::ListPoliciesResponse> ListPolicies(const v1::ListPoliciesRequest& request);
  Answer<v1::Policy> GetPolicy(const v1::GetPolicyRequest& request);

  const Models& models_;
};

}  // namespace epikv
