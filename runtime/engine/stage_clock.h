#pragma once

#include "absl/time/time.h"
#include "runtime/base/steady_time.h"
#include "runtime/step/stage_timer.h"
#include "runtime/step/step_stats.h"

namespace epikv {

// Charges wall and CPU time to one stage after another.
class StageClock {
 public:
  explicit StageClock(StepStats& step) : step_(step) {}
  void Charge(Stage stage) {
    const absl::Time wall = SteadyNow();
    const absl::Duration cpu = ThreadCpu();
    step_.wall[static_cast<int>(stage)] += wall - wall_;
    step_.cpu[static_cast<int>(stage)] += cpu - cpu_;
    wall_ = wall;
    cpu_ = cpu;
  }
  void ChargeTotal() {
    step_.total_wall = wall_ - start_wall_;
    step_.total_cpu = cpu_ - start_cpu_;
  }

 private:
  StepStats& step_;
  absl::Time wall_ = SteadyNow();
  absl::Duration cpu_ = ThreadCpu();
  const absl::Time start_wall_ = wall_;
  const absl::Duration start_cpu_ = cpu_;
};

}  // namespace epikv
