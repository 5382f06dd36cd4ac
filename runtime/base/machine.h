#pragma once

#include <cstdint>

namespace epikv {

// CPUs this process may use: the smaller of its affinity mask and its cgroup's quota (v1 or v2),
// rounded down, at least 1.
int64_t CpuQuota();

// Bytes this process may still take: the smaller of the machine's available memory and what its
// cgroup leaves, without what ReservedMemory has yet to touch and what is set aside.
int64_t AvailableMemoryBytes();

// Memory that was taken whole and becomes resident as it is first touched: the machine counts it as
// available until then. Lives no longer than the memory. Thread-safe.
class ReservedMemory {
 public:
  ReservedMemory(const void* begin, int64_t bytes);
  ~ReservedMemory();
  ReservedMemory(const ReservedMemory&) = delete;
  ReservedMemory& operator=(const ReservedMemory&) = delete;

  int64_t UntouchedBytes() const;  // whole pages

 private:
  const uintptr_t begin_, end_;  // of the whole pages
};

// Bytes that are taken only now and then, as those of the largest forward are: they are not
// available to anything else meanwhile. Thread-safe.
class MemorySetAside {
 public:
  explicit MemorySetAside(int64_t bytes);
  ~MemorySetAside();
  MemorySetAside(const MemorySetAside&) = delete;
  MemorySetAside& operator=(const MemorySetAside&) = delete;

 private:
  const int64_t bytes_;
};

}  // namespace epikv
