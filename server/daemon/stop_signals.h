#pragma once

#include <signal.h>

#include "absl/base/call_once.h"
#include "absl/synchronization/notification.h"

namespace epikv {

// SIGTERM and SIGINT, taken by a thread of its own. The first is an orderly stop, once Serve was
// called, and so is Stop; any other signal ends the process at once. Made before all other threads,
// which inherit that the signals are blocked.
class StopSignals {
 public:
  StopSignals();

  void Serve() { serving_.Notify(); }
  void Stop();  // any thread, any time
  void AwaitStop() const { stop_.WaitForNotification(); }

 private:
  void Run();

  sigset_t set_;
  absl::once_flag once_;
  absl::Notification serving_, stop_;
};

}  // namespace epikv
