#include "server/daemon/stop_signals.h"

#include <pthread.h>

#include <cstdlib>
#include <thread>

namespace epikv {

StopSignals::StopSignals() {
  sigemptyset(&set_);
  sigaddset(&set_, SIGTERM);
  sigaddset(&set_, SIGINT);
  pthread_sigmask(SIG_BLOCK, &set_, nullptr);
  signal(SIGPIPE, SIG_IGN);                 // a client that has gone is an error of its write
  signal(SIGXFSZ, SIG_IGN);                 // so is a file that may not grow (`ulimit -f`)
  signal(SIGHUP, SIG_IGN);                  // log rotation sends it; files are looked at without
  std::thread([this] { Run(); }).detach();  // waits for signals until the process ends
}

void StopSignals::Stop() {
  absl::call_once(once_, [this] { stop_.Notify(); });
}

void StopSignals::Run() {
  int signal = 0;
  sigwait(&set_, &signal);
  if (!serving_.HasBeenNotified()) std::_Exit(128 + signal);
  Stop();
  sigwait(&set_, &signal);
  std::_Exit(128 + signal);
}

}  // namespace epikv
