#include "server/base/task_thread.h"

#include <algorithm>
#include <utility>

namespace epikv {

TaskThread::~TaskThread() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  thread_.join();
}

void TaskThread::Post(const std::string& owner, std::function<void()> task) {
  absl::MutexLock lock(&mu_);
  auto of = std::find_if(owners_.begin(), owners_.end(),
                         [&owner](const Owner& other) { return other.name == owner; });
  if (of == owners_.end()) of = owners_.insert(of, Owner{.name = owner, .tasks = {}});
  of->tasks.push_back(std::move(task));
}

int64_t TaskThread::Waiting(const std::string& owner) const {
  absl::MutexLock lock(&mu_);
  for (const Owner& other : owners_) {
    if (other.name == owner) return static_cast<int64_t>(other.tasks.size());
  }
  return 0;
}

void TaskThread::Run() {
  auto called = [this]()
                    ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !owners_.empty() || stopping_; };
  for (;;) {
    std::function<void()> task;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(&called));
      if (owners_.empty()) return;
      Owner& owner = owners_.front();
      task = std::move(owner.tasks.front());
      owner.tasks.pop_front();
      if (owner.tasks.empty()) {
        owners_.pop_front();
      } else {
        owners_.splice(owners_.end(), owners_, owners_.begin());
      }
    }
    task();
  }
}

}  // namespace epikv
