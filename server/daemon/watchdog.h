#pragma once

#include <set>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "runtime/base/steady_cond_var.h"
#include "server/base/lifecycle.h"
#include "server/base/log.h"
#include "server/models/models.h"

namespace epikv {

struct WatchdogOptions {
  absl::Duration limit;  // of a step; infinite: none
  absl::Duration poll = absl::Seconds(1);
};

// Looks, on a thread of its own, whether the steps of engines come to their ends. One that lasts
// longer than the limit may never: health says so, until it does. Metrics are told how long steps
// last. All that is given by reference outlives it.
class Watchdog {
 public:
  Watchdog(WatchdogOptions options, const Models& models, Lifecycle& lifecycle, const Log& log);
  ~Watchdog();

 private:
  void Run();
  void Look();

  const WatchdogOptions options_;
  const Models& models_;
  Lifecycle& lifecycle_;
  const Log& log_;
  std::set<std::string> stuck_;  // of the thread
  absl::Mutex mu_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  SteadyCondVar stop_;
  std::thread thread_;
};

// Ends the process with status 1 after so long, whatever hangs: the last resort of an end.
void EndByForce(absl::Duration after, const Log& log);

}  // namespace epikv
