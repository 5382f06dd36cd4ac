#include "server/base/log.h"

#include <grpc/support/log.h>
#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace epikv {
namespace {

constexpr absl::string_view kNames[] = {"debug", "info", "warning", "error"};

constexpr int64_t kGrpcLinesPerSecond = 10;

Log* grpc_log = nullptr;

void SayForGrpc(gpr_log_func_args* said) {
  static auto& limit = *new LineLimit(kGrpcLinesPerSecond);
  const LogLevel level =
      said->severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kWarning : LogLevel::kDebug;
  if (!grpc_log->Says(level)) return;
  const std::optional<int64_t> kept_back = limit.Take(SteadyNow());
  if (!kept_back.has_value()) return;
  const std::string more =
      *kept_back == 0 ? ""
                      : absl::StrCat(" (", *kept_back, " lines before this one were left out)");
  grpc_log->Say(level, absl::StrCat("gRPC: ", said->message, more));
}

}  // namespace

std::optional<int64_t> LineLimit::Take(absl::Time now) {
  absl::MutexLock lock(&mu_);
  if (now - second_began_ >= absl::Seconds(1) || now < second_began_) {
    second_began_ = now;
    written_ = 0;
  }
  if (written_ == lines_per_second_) {
    ++kept_back_;
    return std::nullopt;
  }
  ++written_;
  return std::exchange(kept_back_, 0);
}

std::optional<LogLevel> LogLevelOf(absl::string_view name) {
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (name == kNames[i]) return static_cast<LogLevel>(i);
  }
  return std::nullopt;
}

bool WriteToStderr(absl::string_view text) {
  while (!text.empty()) {
    // A pipe that polls as writable takes so much at once.
    const size_t part = std::min<size_t>(text.size(), PIPE_BUF);
    pollfd room{.fd = STDERR_FILENO, .events = POLLOUT, .revents = 0};
    if (poll(&room, 1, 0) <= 0) return false;
    const ssize_t written = write(STDERR_FILENO, text.data(), part);
    if (written < 0 && errno != EINTR) return false;
    if (written > 0) text.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

void Log::Say(LogLevel level, absl::string_view line) const {
  if (!Says(level)) return;
  const absl::string_view mark = level == LogLevel::kInfo ? "" : kNames[static_cast<size_t>(level)];
  absl::MutexLock lock(&mu_);
  const std::string more =
      lost_ == 0 ? "" : absl::StrCat(" (", lost_, " lines before this one had no room)");
  const bool written = WriteToStderr(absl::StrFormat("[%6.1f s] %s%s%s%s\n",
                                                     absl::ToDoubleSeconds(SteadyNow() - start_),
                                                     mark, mark.empty() ? "" : ": ", line, more));
  lost_ = written ? 0 : lost_ + 1;
}

void Log::TakeGrpc() {
  grpc_log = this;
  gpr_set_log_function(SayForGrpc);
}

}  // namespace epikv
