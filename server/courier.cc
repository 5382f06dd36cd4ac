#include "server/courier.h"

#include <utility>

#include "absl/time/clock.h"

namespace epikv {

Courier::Courier(absl::Duration patrol) : patrol_(patrol) {
  thread_ = std::thread([this] { Run(); });
}

Courier::~Courier() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  thread_.join();
}

void Courier::Post(std::shared_ptr<Outbox> outbox) {
  absl::MutexLock lock(&mu_);
  posted_.push_back(std::move(outbox));
}

void Courier::Watch(std::weak_ptr<Outbox> outbox) {
  absl::MutexLock lock(&mu_);
  watched_.push_back(std::move(outbox));
}

std::vector<std::shared_ptr<Outbox>> Courier::TakePosted(absl::Time until) {
  absl::MutexLock lock(&mu_);
  auto called = [this]()
                    ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !posted_.empty() || stopping_; };
  mu_.AwaitWithDeadline(absl::Condition(&called), until);
  return std::exchange(posted_, {});
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
  absl::Time next_patrol = absl::Now() + patrol_;
  for (;;) {
    std::vector<std::shared_ptr<Outbox>> posted = TakePosted(next_patrol);
    for (const auto& outbox : posted) outbox->Deliver();
    if (absl::Now() >= next_patrol) {
      for (const auto& outbox : LiveOutboxes()) outbox->CheckStall();
      next_patrol = absl::Now() + patrol_;
    }
    absl::MutexLock lock(&mu_);
    if (stopping_ && posted_.empty()) return;
  }
}

}  // namespace epikv
