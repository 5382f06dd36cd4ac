#pragma once

#include <cstdint>
#include <memory>

// Memory that a step reads from end to end. In pages of 4 KiB a processor looks up an address for
// every 64 cache lines, and its prefetchers end there. Where the system gives huge pages only to
// those that ask (transparent_hugepage: madvise) these ask; where it gives none, they are as other
// memory.

namespace epikv {

inline constexpr int64_t kHugePage = int64_t{2} << 20;

// Of the huge pages that lie wholly within; before they are first written.
void AdviseHugePages(void* memory, int64_t bytes);

// Weights of one model side by side, so that small ones share a page. Not thread-safe.
class WeightArena {
 public:
  // Zeros, aligned to 64; they stay until the last copy is gone. Throws std::bad_alloc.
  std::shared_ptr<char> Allocate(int64_t bytes);

 private:
  std::shared_ptr<char> region_;
  int64_t size_ = 0, used_ = 0;  // bytes of `region_`
};

}  // namespace epikv
