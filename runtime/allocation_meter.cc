#include "runtime/allocation_meter.h"

#include <c10/core/Allocator.h>

#include <algorithm>

namespace epikv {

class AllocationMeter::Reporter final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override {
    if (size > 0) ++allocations;
    held += size;  // below 0 for what was freed
    peak_bytes = std::max(peak_bytes, held);
  }
  bool memoryProfilingEnabled() const override { return true; }

  int64_t allocations = 0, held = 0, peak_bytes = 0;
};

AllocationMeter::AllocationMeter()
    : reporter_(std::make_shared<Reporter>()),
      guard_(c10::DebugInfoKind::PROFILER_STATE, reporter_) {}

int64_t AllocationMeter::allocations() const { return reporter_->allocations; }
int64_t AllocationMeter::peak_bytes() const { return reporter_->peak_bytes; }

}  // namespace epikv
