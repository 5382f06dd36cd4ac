#pragma once

#include <prometheus/exposer.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/metrics/metrics.h"

namespace epikv {

// The HTTP port with /metrics, and a link to it on /. Has threads of its own; a connection that
// says nothing holds one for two seconds.
class MetricsServer {
 public:
  // address: host:port. The error names it.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const std::string& address);

  // From now on these are served too, while they live.
  void Serve(const Metrics& metrics);
  int port() const { return exposer_.GetListeningPorts().front(); }

 private:
  explicit MetricsServer(const std::string& address);

  prometheus::Exposer exposer_;
};

}  // namespace epikv
