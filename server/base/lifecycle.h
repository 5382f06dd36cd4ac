#pragma once

#include <grpcpp/health_check_service_interface.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

namespace epikv {

enum class ServerState {
  kStarting,  // the first models are being loaded
  kServing,
  kDraining,  // new requests are refused; what runs goes on
};
absl::string_view ServerStateName(ServerState state);  // "STARTING"

// What the daemon is doing, and what grpc.health.v1 says of it: in kServing a model serves that is
// in service, and a service, and the whole, if any model is; "liveness" unless an engine is stuck.
// Thread-safe.
class Lifecycle {
 public:
  // names: of services, "" for the whole. `health` is told of every change from now on, and
  // outlives this or is detached.
  void Attach(grpc::HealthCheckServiceInterface& health, std::vector<std::string> names);
  void Detach(grpc::HealthCheckServiceInterface& health);

  void SetState(ServerState state);
  void SetModel(const std::string& name, bool in_service);  // "models/NAME"
  // The models, by name, of which nobody knows whether they will ever answer: they do not serve,
  // and while there are any "liveness" does not either.
  void SetStuck(std::set<std::string> models);
  ServerState state() const;
  // Whether any model serves: what health says of the whole.
  bool serving() const;

 private:
  struct Listener {
    grpc::HealthCheckServiceInterface* health;
    std::vector<std::string> names;
    std::map<std::string, bool> told;  // who watches hears of changes alone
  };
  void Tell(Listener& listener) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool Serves(const std::string& model, bool in_service) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return in_service && state_ == ServerState::kServing && !stuck_.contains(model);
  }

  mutable absl::Mutex mu_;
  ServerState state_ ABSL_GUARDED_BY(mu_) = ServerState::kStarting;
  std::map<std::string, bool> models_ ABSL_GUARDED_BY(mu_);
  std::set<std::string> stuck_ ABSL_GUARDED_BY(mu_);
  std::vector<Listener> listeners_ ABSL_GUARDED_BY(mu_);
};

}  // namespace epikv
