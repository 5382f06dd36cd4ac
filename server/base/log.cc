#include "server/base/log.h"

#include <grpc/support/log.h>

#include <iostream>
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
  const std::optional<int64_t> kept_back = limit.Take(absl::Now());
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

void Log::Say(LogLevel level, absl::string_view line) const {
  if (!Says(level)) return;
  const absl::string_view mark = level == LogLevel::kInfo ? "" : kNames[static_cast<size_t>(level)];
  const std::string text =
      absl::StrFormat("[%6.1f s] %s%s%s\n", absl::ToDoubleSeconds(absl::Now() - start_), mark,
                      mark.empty() ? "" : ": ", line);
  absl::MutexLock lock(&mu_);
  std::cerr << text << std::flush;
}

void Log::TakeGrpc() {
  grpc_log = this;
  gpr_set_log_function(SayForGrpc);
}

}  // namespace epikv
