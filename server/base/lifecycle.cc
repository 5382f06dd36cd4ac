#include "server/base/lifecycle.h"

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
  listeners_.push_back({.health = &health, .names = std::move(names)});
  Tell(listeners_.back());
}

void Lifecycle::Detach(grpc::HealthCheckServiceInterface& health) {
  absl::MutexLock lock(&mu_);
  std::erase_if(listeners_, [&](const Listener& l) { return l.health == &health; });
}

void Lifecycle::SetState(ServerState state) {
  absl::MutexLock lock(&mu_);
  if (std::exchange(state_, state) == state) return;
  for (Listener& listener : listeners_) Tell(listener);
}

void Lifecycle::SetModel(const std::string& name, bool in_service) {
  absl::MutexLock lock(&mu_);
  models_[name] = in_service;
  for (Listener& listener : listeners_) Tell(listener);
}

void Lifecycle::SetStuck(std::set<std::string> models) {
  absl::MutexLock lock(&mu_);
  if (models == stuck_) return;
  stuck_ = std::move(models);
  for (Listener& listener : listeners_) Tell(listener);
}

ServerState Lifecycle::state() const {
  absl::MutexLock lock(&mu_);
  return state_;
}

bool Lifecycle::serving() const {
  absl::MutexLock lock(&mu_);
  for (const auto& [name, in_service] : models_) {
    if (Serves(name, in_service)) return true;
  }
  return false;
}

void Lifecycle::Tell(Listener& listener) const {
  auto tell = [&](const std::string& name, bool serves) {
    const auto [told, first] = listener.told.try_emplace(name, serves);
    if (!first && std::exchange(told->second, serves) == serves) return;
    listener.health->SetServingStatus(name, serves);
  };
  // For probes that kill: one that asked for "" would end a daemon that loads or drains.
  tell("liveness", stuck_.empty());
  bool serving = false;  // of one that has no model a balancer would get nothing but NOT_FOUND
  for (const auto& [name, in_service] : models_) {
    const bool serves = Serves(name, in_service);
    tell(absl::StrCat("models/", name), serves);
    serving |= serves;
  }
  for (const std::string& name : listener.names) tell(name, serving);
}

}  // namespace epikv
