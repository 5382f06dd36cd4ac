#include "server/log.h"

#include <grpc/support/log.h>

#include <iostream>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace epikv {
namespace {

constexpr absl::string_view kNames[] = {"debug", "info", "warning", "error"};

Log* grpc_log = nullptr;

void SayForGrpc(gpr_log_func_args* said) {
  const LogLevel level =
      said->severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kWarning : LogLevel::kDebug;
  grpc_log->Say(level, absl::StrCat("gRPC: ", said->message));
}

}  // namespace

std::optional<LogLevel> LogLevelOf(absl::string_view name) {
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (name == kNames[i]) return static_cast<LogLevel>(i);
  }
  return std::nullopt;
}

void Log::Say(LogLevel level, absl::string_view line) const {
  if (level < level_) return;
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
