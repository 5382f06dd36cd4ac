#include "server/stream/courier.h"

#include <algorithm>
#include <utility>
#include "runtime/base/steady_time.h"

namespace epikv {

Courier::Courier(absl::Duration patrol) : patrol_(patrol) {
  thread_ = std::thread([this] { Run(); });
}

Courier::~Courier() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
    changed_.Signal();
  }
  thread_.join();
}

void Courier::Post(std::shared_ptr<Outbox> outbox) {
  absl::MutexLock lock(&mu_);
  posted_.push_back(std::move(outbox));
  changed_.Signal();
}

void Courier::ComeBack(std::weak_ptr<Outbox> outbox, absl::Duration delay) {
  absl::MutexLock lock(&mu_);
  due_.emplace(SteadyNow() + delay, std::move(outbox));
  changed_.Signal();
}

void Courier::Watch(std::weak_ptr<Outbox> outbox) {
  absl::MutexLock lock(&mu_);
  watched_.push_back(std::move(outbox));
}

std::vector<std::shared_ptr<Outbox>> Courier::TakePosted(absl::Time until) {
  absl::MutexLock lock(&mu_);
  if (!due_.empty()) until = std::min(until, due_.begin()->first);
  auto called = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return !posted_.empty() || stopping_ || (!due_.empty() && due_.begin()->first < until);
  };
  changed_.Wait(mu_, until - SteadyNow(), called);
  return std::exchange(posted_, {});
}

std::vector<std::weak_ptr<Outbox>> Courier::TakeDue() {
  std::vector<std::weak_ptr<Outbox>> taken;
  const absl::Time now = SteadyNow();
  absl::MutexLock lock(&mu_);
  while (!due_.empty() && due_.begin()->first <= now) {
    taken.push_back(std::move(due_.begin()->second));
    due_.erase(due_.begin());
  }
  return taken;
}

std::vector<std::shared_ptr<Outbox>> Courier::LiveOutboxes() {
  std::vector<std::shared_ptr<Outbox>> live;
  absl::MutexLock lock(&mu_);
  std::erase_if(watched_, [&](const std::weak_ptr<Outbox>& outbox) {
    std::shared_ptr<Outbox> owned = outbox.lock();
    if (owned == nullptr) return true;
    live.push_back(std::move(owned));
    return false;
  });
  return live;
}

void Courier::Run() {
  absl::Time next_patrol = SteadyNow() + patrol_;
  for (;;) {
    std::vector<std::shared_ptr<Outbox>> posted = TakePosted(next_patrol);
    for (const auto& outbox : posted) outbox->Deliver();
    for (const auto& due : TakeDue()) {
      if (const std::shared_ptr<Outbox> outbox = due.lock()) outbox->DeliverLate();
    }
    if (SteadyNow() >= next_patrol) {
      for (const auto& outbox : LiveOutboxes()) outbox->CheckStall();
      next_patrol = SteadyNow() + patrol_;
    }
    absl::MutexLock lock(&mu_);
    if (stopping_ && posted_.empty()) return;
  }
}

}  // namespace epikv
