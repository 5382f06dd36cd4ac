#pragma once

#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "epikv/v1/access_log.pb.h"
#include "epikv/v1/generation.pb.h"
#include "runtime/request/request.h"
#include "server/call/call_scope.h"
#include "server/stream/outbox.h"

// What the calls of GenerationService have in common, whether they stream or collect.

namespace epikv {

// Whether a request leaves a packet, and reads its prompt between soft tokens.
struct PacketAsked {
  bool keep = false, soft_tokens = false;
};

// What a call knows of its request once it is queued.
struct CallFacts {
  std::shared_ptr<Outbox> outbox;  // shared with the engine, which may end later or sooner
  v1::Accepted accepted;
  int64_t lanes = 0;
};

struct CallTimes {
  absl::Time start, deadline, now;
};
// Why a call is cancelled at `now`: by its deadline, or by a client that has gone. A client at its
// deadline resets the stream before the server's clock says so: its deadline is the earlier one by
// the way here (50 ms of a busy machine's), and gRPC rounds a timeout up by as much as 1 %. Beyond
// 250 ms a cancel is the client's own, whatever its timeout is.
absl::Status WhyCancelled(const CallTimes& times);
// The same of a call that is live, now.
absl::Status WhyCancelledNow(const CallScope& scope);

// For the retries of gRPC's own clients.
void AddPushback(grpc::CallbackServerContext& context, std::optional<absl::Duration> retry_after);

// What the access log tells of a request that was taken, and of one that has ended.
void LogAccepted(const v1::Accepted& accepted, v1::AccessLogEntry& entry);
void LogFinished(const Finished& finished, int64_t lanes, v1::AccessLogEntry& entry);

}  // namespace epikv
