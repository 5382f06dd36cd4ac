#include "server/metrics/metrics_server.h"

#include <exception>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace epikv {

// By default the library waits 30 s for a request, and a silent connection holds a thread.
MetricsServer::MetricsServer(const std::string& address)
    : exposer_(std::vector<std::string>{"listening_ports", address, "num_threads", "8",
                                        "request_timeout_ms", "2000"}) {}

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    const std::string& address) try {
  return std::unique_ptr<MetricsServer>(new MetricsServer(address));
} catch (const std::exception&) {  // the library's way to say that it cannot bind
  return absl::UnavailableError(
      absl::StrCat("cannot listen on ", address,
                   " for /metrics: the port is in use, or the host is not this machine's; choose "
                   "another with --metrics_listen"));
}

void MetricsServer::Serve(const Metrics& metrics) { exposer_.RegisterCollectable(metrics.page()); }

}  // namespace epikv
