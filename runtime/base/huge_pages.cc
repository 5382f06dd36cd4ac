#include "runtime/base/huge_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace epikv {
namespace {

constexpr int64_t kRegion = int64_t{64} << 20;  // of addresses: what is not written is no memory
constexpr int64_t kLine = 64;

int64_t RoundUp(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

// Aligned to kHugePage.
std::shared_ptr<char> Map(int64_t bytes) {
  const int64_t mapped = bytes + kHugePage;
  void* const begin =
      mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (begin == MAP_FAILED) throw std::bad_alloc();
  const std::shared_ptr<void> all(begin, [mapped](void* memory) { munmap(memory, mapped); });
  const auto address = reinterpret_cast<int64_t>(begin);
  char* const aligned = static_cast<char*>(begin) + (RoundUp(address, kHugePage) - address);
  AdviseHugePages(aligned, bytes);
  return {all, aligned};
}

}  // namespace

void AdviseHugePages(void* memory, int64_t bytes) {
  const auto address = reinterpret_cast<int64_t>(memory);
  const int64_t begin = RoundUp(address, kHugePage),
                end = (address + bytes) / kHugePage * kHugePage;
  // It may be refused, as by a kernel without them.
  if (begin < end)
    madvise(static_cast<char*>(memory) + (begin - address), end - begin, MADV_HUGEPAGE);
}

std::shared_ptr<char> WeightArena::Allocate(int64_t bytes) {
  const int64_t taken = RoundUp(bytes, kLine);
  if (region_ == nullptr || used_ + taken > size_) {
    size_ = std::max(kRegion, RoundUp(taken, kHugePage));
    region_ = Map(size_);
    used_ = 0;
  }
  used_ += taken;
  return {region_, region_.get() + used_ - taken};
}

}  // namespace epikv
