#pragma once

#include <string>
#include <variant>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "epikv/v1/config.pb.h"
#include "server/daemon/config.h"

namespace epikv {

// What the command line asks for.
struct PrintHelp {
  std::string text;
};
struct PrintVersion {};
struct PrintConfig {
  std::string text;  // as a file that --config reads
};
struct Run {
  v1::ServerConfig config;  // checked
};
using Command = std::variant<Run, PrintHelp, PrintVersion, PrintConfig>;

// Defaults, then the file of --config, then flags (--name=value, --name value; of a bool also
// --name). `args` without the program's name. The error names everything that is wrong.
absl::StatusOr<Command> ParseCommandLine(absl::Span<const std::string> args);

// The same, for a program that looks for a running daemon: no model need be named.
absl::StatusOr<Config> ParseSettings(absl::Span<const std::string> args);

}  // namespace epikv
