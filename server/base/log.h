#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "runtime/base/steady_time.h"

namespace epikv {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
std::optional<LogLevel> LogLevelOf(absl::string_view name);  // "debug", "info", "warning", "error"

// Counts the lines that are too many. Thread-safe.
class LineLimit {
 public:
  explicit LineLimit(int64_t lines_per_second) : lines_per_second_(lines_per_second) {}

  // How many lines were kept back before this one; absent: it is kept back, too.
  std::optional<int64_t> Take(absl::Time now);

 private:
  const int64_t lines_per_second_;
  absl::Mutex mu_;
  absl::Time second_began_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  int64_t written_ ABSL_GUARDED_BY(mu_) = 0;  // in this second
  int64_t kept_back_ ABSL_GUARDED_BY(mu_) = 0;
};

// Writes to stderr, unless that would wait: nobody may empty the pipe that it is. False: not all of
// it was written.
bool WriteToStderr(absl::string_view text);

// Tells people on stderr what happens, a line each, and since when: "[   0.3 s] warming up". Lines
// for which stderr has no room are left out, and counted in the next one. Of requests there is the
// access log. Thread-safe.
class Log {
 public:
  explicit Log(LogLevel level = LogLevel::kInfo) : level_(level) {}

  bool Says(LogLevel level) const { return level >= level_; }
  void Say(LogLevel level, absl::string_view line) const;
  void Info(absl::string_view line) const { Say(LogLevel::kInfo, line); }
  void Warn(absl::string_view line) const { Say(LogLevel::kWarning, line); }

  void SetLevel(LogLevel level) { level_ = level; }
  // What gRPC has to say comes here too, from now on: its errors (failed handshakes, files of TLS
  // that cannot be read) as warnings, the rest as debug. Any client can cause it, so it is ten
  // lines a second. Precondition: this lives until the process ends.
  void TakeGrpc();

 private:
  const absl::Time start_ = SteadyNow();
  std::atomic<LogLevel> level_;
  mutable absl::Mutex mu_;  // one line at a time
  mutable int64_t lost_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace epikv
