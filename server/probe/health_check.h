#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/port/tls.h"

namespace epikv {

// One question to grpc.health.v1 of a daemon on this machine.
struct HealthCheckOptions {
  std::string listen;   // the daemon's; where that is every interface, loopback is asked
  TlsFiles tls;         // the daemon's; with client_ca, certificate and key are shown to it
  std::string service;  // as Lifecycle names them
  absl::Duration timeout = absl::Seconds(5);
};

// OK: it serves. The error says what it does instead, or why nothing is known. With TLS the
// daemon's certificate is not verified: it names the host that clients ask for, and the question
// holds no secret.
absl::Status CheckHealth(const HealthCheckOptions& options);

}  // namespace epikv
