#pragma once

#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "epikv/v1/admin.grpc.pb.h"
#include "server/base/lifecycle.h"
#include "server/base/task_thread.h"
#include "server/call/call_scope.h"
#include "server/call/service.h"
#include "server/daemon/settings.h"
#include "server/models/models.h"

namespace epikv {

// For operators: what the daemon is doing, and how to change it. Thread-safe; everything given to
// it outlives it, and it outlives its calls.
class AdminService final : public Service {
 public:
  using Load = std::function<absl::StatusOr<ModelPtr>(const ModelSource&)>;

  // load: makes a model ready, on a thread of its own.
  AdminService(Models& models, Lifecycle& lifecycle, Settings& settings, const Frontend& frontend,
               Load load);
  // Waits for the model that is being loaded.
  ~AdminService() override;

  // For the end of the process, since loading cannot be cancelled: its caller is told UNAVAILABLE
  // now. True: the thread goes on, and uses what was given to this; the process has to end without
  // destroying it.
  bool AbandonLoading();

 private:
  Answer<v1::ServerStatus> GetServerStatus(const v1::GetServerStatusRequest& request);
  Answer<v1::GetLoadResponse> GetLoad(const v1::GetLoadRequest& request);
  void ListActiveRequests(
      const v1::ListActiveRequestsRequest& request,
      const std::shared_ptr<PendingAnswer<v1::ListActiveRequestsResponse>>& pending);
  Answer<v1::ServerStatus> Drain(const v1::DrainRequest& request);
  Answer<v1::ServerStatus> Resume(const v1::ResumeRequest& request);
  Answer<v1::ServerConfig> GetConfig(const v1::GetConfigRequest& request);
  Answer<v1::ServerConfig> UpdateConfig(const v1::UpdateConfigRequest& request);
  void LoadModel(const v1::LoadModelRequest& request,
                 const std::shared_ptr<PendingAnswer<v1::Model>>& pending);
  Answer<v1::UnloadModelResponse> UnloadModel(const v1::UnloadModelRequest& request);
  Answer<v1::FlushPrefixCacheResponse> FlushPrefixCache(const v1::FlushPrefixCacheRequest& request);
  void DumpState(const v1::DumpStateRequest& request,
                 const std::shared_ptr<PendingAnswer<v1::DumpStateResponse>>& pending);

  // tell: on answers_.
  void ListRequests(const std::vector<ModelPtr>& models,
                    std::function<void(std::vector<v1::ActiveRequest>)> tell);
  v1::ServerStatus Status() const;
  // Why models cannot be loaded and unloaded now.
  std::optional<grpc::Status> RefuseModels() const;
  Answer<v1::Model> LoadNow(const v1::LoadModelRequest& request);
  std::shared_ptr<PendingAnswer<v1::Model>> TakeLoadCall();

  Models& models_;
  Lifecycle& lifecycle_;
  Settings& settings_;
  const Load load_;
  const absl::Time start_ = absl::Now();
  mutable absl::Mutex mu_;
  std::optional<std::string> loading_ ABSL_GUARDED_BY(mu_);  // the name asked for
  // Null once it has been answered.
  std::shared_ptr<PendingAnswer<v1::Model>> load_call_ ABSL_GUARDED_BY(mu_);
  std::thread loader_ ABSL_GUARDED_BY(mu_);  // joined before the next one starts
  TaskThread answers_;
};

}  // namespace epikv
