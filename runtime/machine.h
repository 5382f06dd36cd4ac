#pragma once

#include <cstdint>

namespace epikv {

// CPUs this process may use: the smaller of its affinity mask and its cgroup's quota (v1 or v2),
// rounded down, at least 1.
int64_t CpuQuota();

// Bytes this process may still take: the smaller of the machine's available memory and what its
// cgroup leaves.
int64_t AvailableMemoryBytes();

}  // namespace epikv
