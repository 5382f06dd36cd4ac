#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace epikv {

// Runs tasks one after the other on a thread of its own: what the thread that posts them must not
// do. It is nice to other threads, engines among them: on a busy core it gets a tenth of what one
// of them gets. Tasks of one owner run in the order in which they were posted; owners take turns,
// so that who posts many waits for them alone. After a second without a task: WhenIdle.
// Thread-safe.
class TaskThread {
 public:
  TaskThread() : thread_([this] { Run(); }) {}
  ~TaskThread();  // after the last task

  void Post(std::function<void()> task) { Post("", std::move(task)); }
  void Post(const std::string& owner, std::function<void()> task) {
    Post(owner, 0, std::move(task));
  }
  // weight: of what the task holds while it waits, bytes say.
  void Post(const std::string& owner, int64_t weight, std::function<void()> task);

  // Of this owner, not begun: how many, and what they weigh.
  int64_t Waiting(const std::string& owner) const;
  int64_t Weighs(const std::string& owner) const;

 private:
  void Run();
  // Whether there is one, or the end, within so long.
  bool AwaitTask(absl::Duration most) const;

  struct Task {
    std::function<void()> run;
    int64_t weight = 0;
  };
  struct Owner {
    std::string name;
    int64_t weight = 0;      // of all
    std::deque<Task> tasks;  // not empty
  };
  const Owner* Find(const std::string& name) const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  mutable absl::Mutex mu_;
  std::list<Owner> owners_ ABSL_GUARDED_BY(mu_);  // whose turn it is first
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace epikv
