#include "server/metrics_server.h"

#include <exception>

#include "absl/strings/str_cat.h"

namespace epikv {

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    const std::string& address) try {
  return std::unique_ptr<MetricsServer>(new MetricsServer(address));
} catch (const std::exception&) {  // the library's way to say that it cannot bind
  return absl::UnavailableError(
      absl::StrCat("cannot listen on ", address,
                   " for /metrics: the port is in use, or the host is not this machine's; choose "
                   "another with --metrics_listen"));
}

void MetricsServer::Serve(const Metrics& metrics) {
  for (const auto& collectable : metrics.collectables()) {
    exposer_.RegisterCollectable(collectable);
  }
}

}  // namespace epikv
