#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "epikv/v1/experiment.grpc.pb.h"
#include "server/base/task_thread.h"
#include "server/call/call_scope.h"
#include "server/call/service.h"
#include "server/experiments/experiments.h"
#include "server/models/models.h"

namespace epikv {

// Definitions of experiments, and what requests turned out to be worth. Thread-safe; everything
// given to it outlives it, and it outlives its calls.
class ExperimentService final : public Service {
 public:
  // experiments: null where there are none; every call is then refused.
  ExperimentService(Experiments* experiments, const Models& models, const Frontend& frontend);

 private:
  // Answered on `thread`, since the store blocks.
  template <typename Request, typename Response, typename... Cancelled>
  void Manage(absl::string_view method, TaskThread& thread,
              Answer<Response> (ExperimentService::*handle)(const Request&, Cancelled...));
  Answer<v1::ListExperimentsResponse> ListExperiments(const v1::ListExperimentsRequest& request);
  Answer<v1::Experiment> GetExperiment(const v1::GetExperimentRequest& request);
  Answer<v1::Experiment> CreateExperiment(const v1::CreateExperimentRequest& request);
  Answer<v1::Experiment> UpdateExperiment(const v1::UpdateExperimentRequest& request);
  Answer<v1::Experiment> StartExperiment(const v1::StartExperimentRequest& request);
  Answer<v1::Experiment> StopExperiment(const v1::StopExperimentRequest& request);
  Answer<v1::ExperimentReport> GetExperimentReport(const v1::GetExperimentReportRequest& request,
                                                   const std::function<bool()>& cancelled);
  Answer<v1::ExperimentPlan> PlanExperiment(const v1::PlanExperimentRequest& request);
  void RecordOutcome(const v1::RecordOutcomeRequest& request,
                     const std::shared_ptr<PendingAnswer<v1::RecordOutcomeResponse>>& pending);
  void BatchRecordOutcomes(
      const v1::BatchRecordOutcomesRequest& request,
      const std::shared_ptr<PendingAnswer<v1::BatchRecordOutcomesResponse>>& pending);

  // A change of one that is there, and what runs from then on.
  Answer<v1::Experiment> Change(const std::string& name, Store::Edit edit);
  // Everything that is wrong with it, its arms' options under the models that are served included.
  std::vector<FieldViolation> Check(const v1::Experiment& experiment) const;

  // done: with the answer to one outcome, at once or on another thread.
  using Told = std::function<void(Answer<v1::RecordOutcomeResponse>)>;
  void Record(const v1::RecordOutcomeRequest& request, const Identity& caller, const Told& told);

  Experiments* const experiments_;
  const Models& models_;
  TaskThread definitions_, reports_;  // end before the rest
};

}  // namespace epikv
