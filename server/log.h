#pragma once

#include <atomic>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace epikv {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
std::optional<LogLevel> LogLevelOf(absl::string_view name);  // "debug", "info", "warning", "error"

// Tells people on stderr what happens, a line each, and since when: "[   0.3 s] warming up". Of
// requests there is the access log. Thread-safe.
class Log {
 public:
  explicit Log(LogLevel level = LogLevel::kInfo) : level_(level) {}

  void Say(LogLevel level, absl::string_view line) const;
  void Info(absl::string_view line) const { Say(LogLevel::kInfo, line); }
  void Warn(absl::string_view line) const { Say(LogLevel::kWarning, line); }

  void SetLevel(LogLevel level) { level_ = level; }
  // What gRPC has to say comes here too, from now on: its errors as warnings, the rest as debug.
  // Precondition: this lives until the process ends.
  void TakeGrpc();

 private:
  const absl::Time start_ = absl::Now();
  std::atomic<LogLevel> level_;
  mutable absl::Mutex mu_;  // one line at a time
};

}  // namespace epikv
