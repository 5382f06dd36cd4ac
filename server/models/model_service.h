#pragma once

#include "epikv/v1/model.grpc.pb.h"
#include "server/call/call_scope.h"
#include "server/call/service.h"
#include "server/models/models.h"

namespace epikv {

v1::Model ToProto(const ServedModel& model);

// What is served here. Thread-safe; everything given to it outlives it.
class ModelService final : public Service {
 public:
  ModelService(const Models& models, const Frontend& frontend);

 private:
  Answer<v1::ListModelsResponse> ListModels(const v1::ListModelsRequest& request);
  Answer<v1::Model> GetModel(const v1::GetModelRequest& request);

  const Models& models_;
};

}  // namespace epikv
