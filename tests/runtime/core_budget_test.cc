#include "runtime/engine/core_budget.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "absl/synchronization/barrier.h"
#include "absl/synchronization/notification.h"

namespace epikv {
namespace core_budget_test {

TEST(CoreBudgetTest, NeverGivesOutMoreThanThereIs) {
  constexpr int kThreads = 6, kSteps = 2000;
  CoreBudget budget(3);
  std::atomic<int64_t> used{0}, most{0};
  std::vector<std::thread> engines;
  for (int t = 0; t < kThreads; ++t) {
    engines.emplace_back([&, cores = 1 + t % 3] {
      for (int i = 0; i < kSteps; ++i) {
        const CoreBudget::Lease lease = budget.Take(cores);
        const int64_t now = used += cores;
        int64_t seen = most;
        while (now > seen && !most.compare_exchange_weak(seen, now)) {
        }
        used -= cores;
      }
    });
  }
  for (std::thread& engine : engines) engine.join();
  EXPECT_LE(most, 3);
  EXPECT_EQ(used, 0);
}

TEST(CoreBudgetTest, WhoAsksForMoreThanThereIsGetsAll) {
  CoreBudget budget(2);
  { const CoreBudget::Lease all = budget.Take(100); }
  const CoreBudget::Lease again = budget.Take(2);
}

TEST(CoreBudgetTest, IdleCoresAreThoseThatNobodyHasOrWants) {
  CoreBudget budget(3);
  {
    std::optional<CoreBudget::Lease> idle = budget.TakeIdle(2);
    ASSERT_TRUE(idle.has_value());
    EXPECT_FALSE(budget.TakeIdle(1).has_value()) << "beside others that are in use";
    std::thread wants_all([&] { const CoreBudget::Lease all = budget.Take(3); });
    while (budget.waiting() < 1) std::this_thread::yield();
    idle.reset();
    wants_all.join();
  }
  EXPECT_TRUE(budget.TakeIdle(100).has_value());
  EXPECT_TRUE(budget.TakeIdle(3).has_value()) << "all had been given back";
}

// One that waits for many cores is not overtaken for ever by those who want few.
TEST(CoreBudgetTest, FirstComeFirstServed) {
  CoreBudget budget(2);
  std::vector<int> order;
  absl::Mutex mu;
  auto step = [&](int name, int64_t cores) {
    const CoreBudget::Lease lease = budget.Take(cores);
    absl::MutexLock lock(&mu);
    order.push_back(name);
  };
  std::thread wide, narrow;
  {
    const CoreBudget::Lease one = budget.Take(1);
    wide = std::thread(step, 1, 2);
    while (budget.waiting() < 1) std::this_thread::yield();
    narrow = std::thread(step, 2, 1);  // would fit beside `one`
    while (budget.waiting() < 2) std::this_thread::yield();
  }
  wide.join();
  narrow.join();
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

}  // namespace core_budget_test
}  // namespace epikv
