#include "runtime/base/parallel_for.h"

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

namespace epikv {
namespace parallel_for_test {

using ::testing::Each;

class ParallelForTest : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { at::set_num_threads(GetParam()); }
  void TearDown() override { at::set_num_threads(1); }
};

TEST_P(ParallelForTest, EachIsThereOnce) {
  for (const int64_t count : {0, 1, 2, 3, 14, 152, 1000}) {
    for (const int64_t grain : {1, 5, 2000}) {
      std::vector<std::atomic<int>> times(count);
      ParallelFor(count, grain, [&](int64_t begin, int64_t end) {
        ASSERT_LT(begin, end);
        for (int64_t i = begin; i < end; ++i) ++times[i];
      });
      EXPECT_THAT(std::vector<int>(times.begin(), times.end()), Each(1)) << count << ", " << grain;
    }
  }
}

TEST_P(ParallelForTest, WhatIsNotWorthTwoThreadsRunsHereAndAtOnce) {
  int calls = 0;
  ParallelFor(100, 100, [&, caller = std::this_thread::get_id()](int64_t begin, int64_t end) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    EXPECT_EQ(end - begin, 100);
    ++calls;
  });
  EXPECT_EQ(calls, 1);
}

TEST_P(ParallelForTest, WhatAPartThrowsIsThrownHere) {
  auto run = [](int64_t begin, int64_t end) {
    if (begin <= 500 && 500 < end) throw std::out_of_range("500");
  };
  EXPECT_THROW(ParallelFor(1000, 1, run), std::out_of_range);
}

// One thread is held until all but its own part is done: by the others.
TEST_P(ParallelForTest, AThreadThatIsSlowIsNotWaitedForWithWorkLeft) {
  std::atomic<int> threads = 0;
  at::parallel_for(0, GetParam(), 1, [&](int64_t, int64_t) { ++threads; });
  if (threads == 1) GTEST_SKIP() << "nobody else is there";
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  std::atomic<int64_t> done = 0;
  std::atomic<bool> held = false;
  ParallelFor(1000, 1, [&](int64_t begin, int64_t end) {
    if (!held.exchange(true)) {
      while (done < 1000 - (end - begin) && std::chrono::steady_clock::now() < limit) {
        std::this_thread::yield();
      }
      EXPECT_EQ(done, 1000 - (end - begin));
    }
    done += end - begin;
  });
  EXPECT_EQ(done, 1000);
}

INSTANTIATE_TEST_SUITE_P(Threads, ParallelForTest, ::testing::Values(1, 2, 4));

}  // namespace parallel_for_test
}  // namespace epikv
