#include <grpc/support/log.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "server/daemon/command_line.h"
#include "server/probe/health_check.h"

// epikv-probe: asks the daemon on this machine for its health, for containers whose image has no
// other client. Without torch, so that asking costs 20 ms and 16 MB.

namespace epikv {
namespace {

constexpr char kHelp[] =
    R"(epikv-probe asks the epikvd on this machine for its health (grpc.health.v1): exit status 0 if
it serves, else 1 with a line that says why.

  epikv-probe [SERVICE] [--config=FILE] [--name=value ...]

  SERVICE  none: whether requests are taken, not while models are loaded and not in a drain;
           liveness: whether the port answers, in every state; models/NAME: whether that model is
           in service; or a service's full name
  flags    epikvd's, as it was given them: listen and tls_* say whom to ask. A daemon that asks for
           certificates (tls_client_ca) is shown tls_certificate
)";

int Main(std::vector<std::string> args) {
  if (std::find(args.begin(), args.end(), "--help") != args.end()) {
    std::cout << kHelp;
    return 0;
  }
  HealthCheckOptions options;
  if (!args.empty() && !absl::StartsWith(args.front(), "--")) {
    options.service = args.front();
    args.erase(args.begin());
  }
  gpr_set_log_function([](gpr_log_func_args*) {});  // the status says it
  const absl::StatusOr<Config> config = ParseSettings(args);
  absl::Status status = config.status();
  if (config.ok()) {
    options.listen = config->listen;
    options.tls = config->tls;
    status = CheckHealth(options);
  }
  if (status.ok()) return 0;
  std::cerr << "epikv-probe: " << status.message() << std::endl;
  return 1;
}

}  // namespace
}  // namespace epikv

int main(int argc, char** argv) { return epikv::Main({argv + 1, argv + argc}); }
