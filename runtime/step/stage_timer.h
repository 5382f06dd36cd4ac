#pragma once

#include <time.h>

#include "absl/time/time.h"
#include "runtime/base/steady_time.h"
#include "runtime/step/step_stats.h"

namespace epikv {

// CPU time that this thread has taken.
inline absl::Duration ThreadCpu() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return absl::DurationFromTimespec(now);
}

// Charges the time of a scope to one stage.
class StageTimer {
 public:
  StageTimer(StepStats& step, Stage stage) : step_(step), stage_(static_cast<int>(stage)) {}
  ~StageTimer() {
    step_.wall[stage_] += SteadyNow() - wall_;
    step_.cpu[stage_] += ThreadCpu() - cpu_;
  }
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;

 private:
  StepStats& step_;
  const int stage_;
  const absl::Time wall_ = SteadyNow();
  const absl::Duration cpu_ = ThreadCpu();
};

}  // namespace epikv
