#include "server/lifecycle.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace epikv {

absl::string_view ServerStateName(ServerState state) {
  switch (state) {
    case ServerState::kStarting:
      return "STARTING";
    case ServerState::kServing:
      return "SERVING";
    case ServerState::kDraining:
      return "DRAINING";
  }
  return "";
}

void Lifecycle::Attach(grpc::HealthCheckServiceInterface& health, std::vector<std::string> names) {
  absl::MutexLock lock(&mu_);
  listeners_.push_back({&health, std::move(names)});
  // For probes that kill: one that asked for "" would end a daemon that loads or drains.
  health.SetServingStatus("liveness", true);
  Tell(listeners_.back());
}

void Lifecycle::Detach(grpc::HealthCheckServiceInterface& health) {
  absl::MutexLock lock(&mu_);
  std::erase_if(listeners_, [&](const Listener& l) { return l.health == &health; });
}

void Lifecycle::SetState(ServerState state) {
  absl::MutexLock lock(&mu_);
  if (std::exchange(state_, state) == state) return;
  for (const Listener& listener : listeners_) Tell(listener);
}

void Lifecycle::SetModel(const std::string& name, bool in_service) {
  absl::MutexLock lock(&mu_);
  models_[name] = in_service;
  for (const Listener& listener : listeners_) TellModel(listener, name, in_service);
}

ServerState Lifecycle::state() const {
  absl::MutexLock lock(&mu_);
  return state_;
}

void Lifecycle::Tell(const Listener& listener) const {
  const bool serving = state_ == ServerState::kServing;
  for (const std::string& name : listener.names) listener.health->SetServingStatus(name, serving);
  for (const auto& [name, in_service] : models_) TellModel(listener, name, in_service);
}

void Lifecycle::TellModel(const Listener& listener, const std::string& name,
                          bool in_service) const {
  listener.health->SetServingStatus(absl::StrCat("models/", name),
                                    in_service && state_ == ServerState::kServing);
}

}  // namespace epikv
