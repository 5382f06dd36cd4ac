#pragma once

#include <c10/core/DeviceType.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>

namespace epikv {

// What tensors that the calling thread makes take of a device's memory, while this lives: as
// LibTorch's allocators report it to a profiler. Not what kernels and libraries take by themselves.
class AllocationMeter {
 public:
  explicit AllocationMeter(c10::DeviceType device = c10::DeviceType::CPU);

  int64_t allocations() const;
  int64_t peak_bytes() const;  // the most of theirs that were held at once

 private:
  class Reporter;
  const std::shared_ptr<Reporter> reporter_;
  const c10::DebugInfoGuard guard_;
};

}  // namespace epikv
