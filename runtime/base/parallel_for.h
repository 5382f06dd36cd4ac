#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace epikv {

// Calls run(begin, end) for parts of [0, count), each once, with a thread for every `grain` of it
// at most. A thread takes another part when it is done with one, smaller than the one before: where
// cores differ in speed, or parts in cost, the dearest first, none waits for long. What a part
// throws is thrown here; parts that were not begun may then be left.
template <class Run>
void ParallelFor(int64_t count, int64_t grain, const Run& run) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), (count + grain - 1) / grain);
  std::atomic<int64_t> next = 0;
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    int64_t begin = 0;
    while (begin < count) {
      const int64_t left = count - begin, share = threads == 1 ? left : left / (2 * threads);
      const int64_t end = begin + std::max<int64_t>(1, share);
      if (!next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
      run(begin, end);
      begin = next.load(std::memory_order_relaxed);
    }
  });
}

}  // namespace epikv
