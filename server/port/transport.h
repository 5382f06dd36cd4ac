#pragma once

#include <grpcpp/server_builder.h>

#include <cstdint>

#include "absl/time/time.h"

namespace epikv {

// What one client may ask of the gRPC port, so that none takes it from the others.
struct TransportLimits {
  int64_t max_message_bytes = 4 << 20;           // received
  int64_t max_sent_message_bytes = 64 << 20;     // of one answer
  int64_t max_concurrent_streams = 512;          // calls of a connection; more of them wait there
  absl::Duration handshake = absl::Seconds(10);  // of a connection, TLS included, at most
  absl::Duration keepalive_floor = absl::Seconds(10);  // clients may ping no more often
  // Of a connection. At its age a client is told to make another one for new calls; what runs goes
  // on for as long as the grace.
  absl::Duration max_connection_age = absl::InfiniteDuration();
  absl::Duration max_connection_age_grace = absl::InfiniteDuration();
  absl::Duration max_connection_idle = absl::InfiniteDuration();  // without a call
};

void SetLimits(const TransportLimits& limits, grpc::ServerBuilder& builder);

}  // namespace epikv
