#include "server/base/task_thread.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "runtime/base/when_idle.h"

namespace epikv {

TaskThread::~TaskThread() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  thread_.join();
}

void TaskThread::Post(const std::string& owner, int64_t weight, std::function<void()> task) {
  absl::MutexLock lock(&mu_);
  auto of = std::find_if(owners_.begin(), owners_.end(),
                         [&owner](const Owner& other) { return other.name == owner; });
  if (of == owners_.end()) of = owners_.insert(of, Owner{.name = owner, .tasks = {}});
  of->tasks.push_back({.run = std::move(task), .weight = weight});
  of->weight += weight;
}

const TaskThread::Owner* TaskThread::Find(const std::string& name) const {
  for (const Owner& owner : owners_) {
    if (owner.name == name) return &owner;
  }
  return nullptr;
}

int64_t TaskThread::Waiting(const std::string& owner) const {
  absl::MutexLock lock(&mu_);
  const Owner* const found = Find(owner);
  return found == nullptr ? 0 : static_cast<int64_t>(found->tasks.size());
}

int64_t TaskThread::Weighs(const std::string& owner) const {
  absl::MutexLock lock(&mu_);
  const Owner* const found = Find(owner);
  return found == nullptr ? 0 : found->weight;
}

namespace {
// On Linux nice values are of threads, whatever POSIX says.
void BeNice() {
  const auto self = static_cast<id_t>(gettid());
  constexpr int kNicer = 10, kMost = 19;
  // It may always be raised.
  (void)setpriority(PRIO_PROCESS, self, std::min(getpriority(PRIO_PROCESS, self) + kNicer, kMost));
}

}  // namespace

void TaskThread::Run() {
  BeNice();
  bool worked = false;
  auto called = [this]()
                    ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !owners_.empty() || stopping_; };
  for (;;) {
    std::function<void()> task;
    if (worked && !AwaitTask(absl::Seconds(1))) WhenIdle::Run();
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(&called));
      if (owners_.empty()) return;
      Owner& owner = owners_.front();
      task = std::move(owner.tasks.front().run);
      owner.weight -= owner.tasks.front().weight;
      owner.tasks.pop_front();
      if (owner.tasks.empty()) {
        owners_.pop_front();
      } else {
        owners_.splice(owners_.end(), owners_, owners_.begin());
      }
    }
    task();
    worked = true;
  }
}

bool TaskThread::AwaitTask(absl::Duration most) const {
  auto called = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !owners_.empty() || stopping_; };
  absl::MutexLock lock(&mu_);
  return mu_.AwaitWithTimeout(absl::Condition(&called), most);
}

}  // namespace epikv
