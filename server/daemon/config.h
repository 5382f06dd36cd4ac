#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "epikv/v1/config.pb.h"
#include "runtime/runtime.h"
#include "server/experiments/options.h"
#include "server/base/log.h"
#include "server/stream/outbox.h"
#include "server/models/served_model.h"
#include "server/port/tls.h"
#include "server/port/transport.h"

namespace epikv {

// The settings of a run, checked. What each means: deploy/epikvd.textproto.
struct Config {
  std::string listen;
  std::string metrics_listen;  // empty: none
  std::string admin_listen;    // empty: none
  LogLevel log_level = LogLevel::kInfo;
  std::vector<ModelSource> models;  // at least one
  RuntimeOptions runtime;           // but for what a ModelSource says
  ServingOptions serving;
  OutboxLimits outbox;
  absl::Duration drain;
  int64_t metrics_max_series = 0;
  bool reflection = false;
  bool channelz = false;
  TransportLimits transport;
  TlsFiles tls;
  std::string tokens_file;  // empty: everyone may do everything
  std::string access_log;   // empty: none
  ExperimentsOptions experiments;
};

// What the command line asks for.
struct PrintHelp {
  std::string text;
};
struct PrintConfig {
  std::string text;  // as a file that --config reads
};
struct Run {
  v1::ServerConfig config;  // checked
};
using Command = std::variant<Run, PrintHelp, PrintConfig>;

// Defaults, then the file of --config, then flags (--name=value, --name value; of a bool also
// --name). `args` without the program's name. The error names everything that is wrong.
absl::StatusOr<Command> ParseCommandLine(absl::Span<const std::string> args);

// The same, for a program that looks for a running daemon: no model need be named.
absl::StatusOr<Config> ParseSettings(absl::Span<const std::string> args);

Config ConfigOf(const v1::ServerConfig& config);

// What is wrong with it, all at once.
std::vector<FieldViolation> ViolationsOf(const v1::ServerConfig& config);
std::vector<FieldViolation> ViolationsOf(const v1::ModelSource& source);
ModelSource FromProto(const v1::ModelSource& source);

}  // namespace epikv
