#include "server/port/transport.h"

#include <grpc/grpc.h>
#include <grpcpp/resource_quota.h>

#include <algorithm>
#include <climits>

namespace epikv {
namespace {

// Of reflection and channelz, the synchronous services: an open stream holds a thread. Ours and
// health are callbacks and take none of these.
constexpr int kMaxSyncThreads = 32;

// gRPC's way to say for ever is INT_MAX.
int Milliseconds(absl::Duration duration) {
  return static_cast<int>(std::clamp<int64_t>(absl::ToInt64Milliseconds(duration), 1, INT_MAX));
}

}  // namespace

void SetLimits(const TransportLimits& limits, grpc::ServerBuilder& builder) {
  builder.SetResourceQuota(grpc::ResourceQuota("epikvd").SetMaxThreads(kMaxSyncThreads));
  builder.SetMaxReceiveMessageSize(static_cast<int>(limits.max_message_bytes));
  builder.SetMaxSendMessageSize(static_cast<int>(limits.max_sent_message_bytes));
  // Until its first HTTP/2 settings, TLS included, a connection costs its client nothing.
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, Milliseconds(limits.handshake));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS,
                             static_cast<int>(limits.max_concurrent_streams));
  // Prefill is silent for long, so clients may ping; ours find half-open connections.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             Milliseconds(limits.keepalive_floor));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 60'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS,
                             Milliseconds(limits.max_connection_age));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS,
                             Milliseconds(limits.max_connection_age_grace));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS,
                             Milliseconds(limits.max_connection_idle));
}

}  // namespace epikv
