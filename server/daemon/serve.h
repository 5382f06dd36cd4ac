#pragma once

#include "absl/status/status.h"
#include "epikv/v1/config.pb.h"
#include "server/daemon/rank_processes.h"
#include "server/daemon/stop_signals.h"

namespace epikv {

// The daemon as one piece: opens ports, loads models, puts them behind engines, serves until a
// signal stops it, and ends all of it in order. Not OK: why it could not serve. Blocks. Ends the
// process itself where a model is still being loaded at the end.
// ranks: the others of --tensor_parallel; null: there are none. If one fails, the daemon stops.
absl::Status Serve(const v1::ServerConfig& settings, StopSignals& signals, RankProcesses* ranks);

}  // namespace epikv
