#pragma once

#include <signal.h>

#include "absl/synchronization/notification.h"

namespace epikv {

// SIGTERM and SIGINT, taken by a thread of its own. The first is an orderly stop, once Serve was
// called; any other ends the process at once. Made before all other threads, which inherit that
// the signals are blocked.
class StopSignals {
 public:
  StopSignals();

  void Serve() { serving_.Notify(); }
  void AwaitStop() const { stop_.WaitForNotification(); }

 private:
  void Run();

  sigset_t set_;
  absl::Notification serving_, stop_;
};

}  // namespace epikv
