#include "runtime/base/allocation_meter.h"

#include <c10/core/Allocator.h>

#include <algorithm>

namespace epikv {

class AllocationMeter::Reporter final : public c10::MemoryReportingInfoBase {
 public:
  explicit Reporter(c10::DeviceType of) : device(of) {}

  void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device of) override {
    if (of.type() != device) return;
    if (size > 0) ++allocations;  // else it was freed
    held += size;
    peak_bytes = std::max(peak_bytes, held);
  }
  bool memoryProfilingEnabled() const override { return true; }

  const c10::DeviceType device;
  int64_t allocations = 0, held = 0, peak_bytes = 0;
};

AllocationMeter::AllocationMeter(c10::DeviceType device)
    : reporter_(std::make_shared<Reporter>(device)),
      guard_(c10::DebugInfoKind::PROFILER_STATE, reporter_) {}

int64_t AllocationMeter::allocations() const { return reporter_->allocations; }
int64_t AllocationMeter::peak_bytes() const { return reporter_->peak_bytes; }

}  // namespace epikv
