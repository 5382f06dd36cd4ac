#include "server/daemon/watchdog.h"

#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace epikv {

Watchdog::Watchdog(WatchdogOptions options, const Models& models, Lifecycle& lifecycle,
                   const Log& log)
    : options_(options), models_(models), lifecycle_(lifecycle), log_(log) {
  thread_ = std::thread([this] { Run(); });
}

Watchdog::~Watchdog() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  stop_.Signal();
  thread_.join();
}

void Watchdog::Run() {
  for (;;) {
    Look();
    absl::MutexLock lock(&mu_);
    auto stopping = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_; };
    if (stop_.Wait(mu_, options_.poll, stopping)) return;
  }
}

void Watchdog::Look() {
  std::set<std::string> stuck;
  for (const ModelPtr& model : models_.Live()) {
    const absl::Duration age = model->engine->StepAge();
    model->metrics->SetStepAge(age < absl::Seconds(1) ? absl::ZeroDuration() : age);
    if (age > options_.limit) stuck.insert(model->name);
  }
  for (const std::string& name : stuck) {
    if (stuck_.contains(name)) continue;
    log_.Warn(absl::StrCat("a step of model '", name, "' has lasted longer than ",
                           absl::FormatDuration(options_.limit),
                           " (--watchdog_seconds) and may never end: health says NOT_SERVING"));
  }
  for (const std::string& name : stuck_) {
    if (!stuck.contains(name)) log_.Info(absl::StrCat("model '", name, "' goes on"));
  }
  stuck_ = stuck;
  lifecycle_.SetStuck(std::move(stuck));
}

void EndByForce(absl::Duration after, const Log& log) {
  std::thread([after, &log] {
    absl::SleepFor(after);
    log.Warn("something hangs and keeps the daemon from its end: it is ended by force");
    std::_Exit(1);
  }).detach();
}

}  // namespace epikv
