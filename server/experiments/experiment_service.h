#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <functional>
#include <memory>
#include <vector>

#include "epikv/v1/experiment.grpc.pb.h"
#include "server/base/task_thread.h"
#include "server/call/call_scope.h"
#include "server/call/rpc.h"
#include "server/experiments/experiments.h"
#include "server/models/models.h"

namespace epikv {

// Definitions of experiments, and what requests turned out to be worth. Thread-safe; everything
// given to it outlives it, and it outlives its calls.
class ExperimentService final
    : public v1::ExperimentService::WithRawCallbackMethod_ListExperiments<
          v1::ExperimentService::WithRawCallbackMethod_GetExperiment<
              v1::ExperimentService::WithRawCallbackMethod_CreateExperiment<
                  v1::ExperimentService::WithRawCallbackMethod_UpdateExperiment<
                      v1::ExperimentService::WithRawCallbackMethod_StartExperiment<
                          v1::ExperimentService::WithRawCallbackMethod_StopExperiment<
                              v1::ExperimentService::WithRawCallbackMethod_GetExperimentReport<
                                  v1::ExperimentService::WithRawCallbackMethod_PlanExperiment<
                                      v1::ExperimentService::WithRawCallbackMethod_RecordOutcome<
                                          v1::ExperimentService::
                                              WithRawCallbackMethod_BatchRecordOutcomes<
                                                  v1::ExperimentService::Service>>>>>>>>>> {
 public:
  // experiments: null where there are none; every call is then refused.
  ExperimentService(Experiments* experiments, const Models& models, const Frontend& frontend);

  grpc::ServerUnaryReactor* ListExperiments(grpc::CallbackServerContext* context,
                                            const grpc::ByteBuffer* in,
                                            grpc::ByteBuffer* out) override;
  grpc::ServerUnaryReactor* GetExperiment(grpc::CallbackServerContext* context,
                                          const grpc::ByteBuffer* in,
                                          grpc::ByteBuffer* out) override;
  grpc::ServerUnaryReactor* CreateExperiment(grpc::CallbackServerContext* context,
                                             const grpc::ByteBuffer* in,
                                             grpc::ByteBuffer* out) override;
  grpc::ServerUnaryReactor* UpdateExperiment(grpc::CallbackServerContext* context,
                                             const grpc::ByteBuffer* in,
                                             grpc::ByteBuffer* out) override;
  grpc::ServerUnaryReactor* StartExperiment(grpc::CallbackServerContext* context,
                                            const grpc::ByteBuffer* in,
                                            grpc::ByteBuffer* out) override;
  grpc::ServerUnaryReactor* StopExperiment(grpc::CallbackServerContext* context,
                                           const grpc::ByteBuffer* in,
                                           grpc::ByteBuffer* out) override;
  grpc::ServerUnaryReactor* GetExperimentReport(grpc::CallbackServerContext* context,
                                                const grpc::ByteBuffer* in,
                                                grpc::ByteBuffer* out) override;
  grpc::ServerUnaryReactor* PlanExperiment(grpc::CallbackServerContext* context,
                                           const grpc::ByteBuffer* in,
                                           grpc::ByteBuffer* out) override;
  grpc::ServerUnaryReactor* RecordOutcome(grpc::CallbackServerContext* context,
                                          const grpc::ByteBuffer* in,
                                          grpc::ByteBuffer* out) override;
  grpc::ServerUnaryReactor* BatchRecordOutcomes(grpc::CallbackServerContext* context,
                                                const grpc::ByteBuffer* in,
                                                grpc::ByteBuffer* out) override;

 private:
  // Answers on `definitions_`, since the store blocks. answer: (const Request&) ->
  // Answer<Response>.
  template <typename Request, typename Response, typename Handler>
  grpc::ServerUnaryReactor* Manage(absl::string_view method, grpc::CallbackServerContext* context,
                                   const grpc::ByteBuffer* in, grpc::ByteBuffer* out,
                                   TaskThread& thread, Handler answer);
  Answer<v1::ExperimentReport> Report(const v1::GetExperimentReportRequest& request);
  Answer<v1::Experiment> Create(const v1::CreateExperimentRequest& request);
  Answer<v1::Experiment> Update(const v1::UpdateExperimentRequest& request);
  // A change of one that is there, and what runs from then on.
  Answer<v1::Experiment> Change(const std::string& name, Store::Edit edit);
  // Everything that is wrong with it, its arms' options under the models that are served included.
  std::vector<FieldViolation> Check(const v1::Experiment& experiment) const;

  // done: with the answer to one outcome, at once or on another thread.
  using Told = std::function<void(Answer<v1::RecordOutcomeResponse>)>;
  void Record(const v1::RecordOutcomeRequest& request, const Identity& caller, const Told& told);

  Experiments* const experiments_;
  const Models& models_;
  const Frontend& frontend_;
  TaskThread definitions_, reports_;  // end before the rest
};

}  // namespace epikv
