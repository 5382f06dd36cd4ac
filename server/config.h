#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "policies/spec.h"
#include "runtime/admission.h"
#include "runtime/engine.h"
#include "runtime/engine_thread.h"
#include "runtime/runtime.h"
#include "server/outbox.h"

namespace epikv {

namespace v1 {
class ServerConfig;
}

// The settings of a run, checked. What each means: deploy/epikvd.textproto.
struct Config {
  std::string listen;
  std::string metrics_listen;  // empty: none
  std::string model_name;      // empty: the manifest's
  RuntimeOptions runtime;
  SchedulerOptions scheduler;
  int64_t max_running_requests = 0;
  QueueLimits queue;
  QueueRule queue_rule;
  bool refuse_infeasible_deadlines = false;
  std::string default_policy;
  bool default_equal_protection = false;
  int64_t default_max_output_tokens = 0;
  OutboxLimits outbox;
  absl::Duration drain;
  int64_t max_message_bytes = 0;
  int64_t metrics_max_series = 0;
  bool reflection = false;
};

// What the command line asks for.
struct PrintHelp {
  std::string text;
};
struct PrintConfig {
  std::string text;  // as a file that --config reads
};
using Command = std::variant<Config, PrintHelp, PrintConfig>;

// Defaults, then the file of --config, then flags (--name=value, --name value; of a bool also
// --name). `args` without the program's name. The error names everything that is wrong.
absl::StatusOr<Command> ParseCommandLine(absl::Span<const std::string> args);

// Whether the catalog has the default policy; known once the policies are.
absl::Status CheckDefaultPolicy(const Config& config, PolicyCatalog catalog);

}  // namespace epikv
