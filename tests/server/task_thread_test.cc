#include "server/base/task_thread.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/notification.h"

namespace epikv {
namespace task_thread_test {

using testing::ElementsAre;

TEST(TaskThreadTest, OwnersTakeTurnsAndEachHasItsOrder) {
  std::vector<std::string> done;
  absl::Notification all_posted;
  {
    TaskThread thread;
    absl::Notification begun;
    thread.Post([&] {
      begun.Notify();
      all_posted.WaitForNotification();
    });
    begun.WaitForNotification();
    const auto post = [&](const std::string& owner, const std::string& name) {
      thread.Post(owner, [&done, name] { done.push_back(name); });
    };
    for (const char* name : {"a1", "a2", "a3", "a4"}) post("a", name);
    for (const char* name : {"b1", "b2"}) post("b", name);
    post("c", "c1");
    EXPECT_EQ(thread.Waiting("a"), 4);
    EXPECT_EQ(thread.Waiting("c"), 1);
    EXPECT_EQ(thread.Waiting(""), 0);
    all_posted.Notify();
  }
  EXPECT_THAT(done, ElementsAre("a1", "b1", "c1", "a2", "b2", "a3", "a4"));
}

int Niceness() { return getpriority(PRIO_PROCESS, static_cast<id_t>(gettid())); }

TEST(TaskThreadTest, IsNiceToOtherThreads) {
  const int own = Niceness();
  int of_thread = own;
  {
    TaskThread().Post([&] { of_thread = Niceness(); });
  }
  EXPECT_EQ(of_thread, std::min(own + 10, 19));
  EXPECT_EQ(Niceness(), own) << "of that thread alone";
}

}  // namespace task_thread_test
}  // namespace epikv
