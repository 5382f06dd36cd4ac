#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "epikv/v1/config.pb.h"
#include "runtime/base/processor.h"
#include "runtime/runtime.h"
#include "server/base/log.h"
#include "server/experiments/options.h"
#include "server/models/model_files.h"
#include "server/models/served_model.h"
#include "server/packets/packet_store.h"
#include "server/port/connections.h"
#include "server/port/tls.h"
#include "server/port/transport.h"
#include "server/sessions/sessions.h"
#include "server/stream/outbox.h"

namespace epikv {

// A coalesced message has to fit into the 4 MiB that clients receive by default.
inline constexpr uint64_t kMaxOutboxBytes = 2 << 20;

// The settings of a run, checked. What each means: deploy/epikvd.textproto.
struct Config {
  std::string listen;
  std::string metrics_listen;  // empty: none
  std::string admin_listen;    // empty: none
  LogLevel log_level = LogLevel::kInfo;
  std::vector<ModelSource> models;  // at least one
  ModelFileRules model_files;
  ProcessorLimit processor = ProcessorLimit::kNone;
  RuntimeOptions runtime;  // but for what a ModelSource says
  int64_t tensor_parallel = 1;
  ServingOptions serving;
  OutboxLimits outbox;
  absl::Duration drain;
  absl::Duration watchdog;  // infinite: none
  int64_t metrics_max_series = 0;
  bool reflection = false;
  bool vllm_dialect = false;
  bool load_reports = false;
  bool channelz = false;
  TransportLimits transport;
  ConnectionLimits connections;  // of `listen`
  TlsFiles tls;
  std::string tokens_file;  // empty: everyone may do everything
  bool shared_prefixes = false;
  std::string access_log;  // empty: none
  ExperimentsOptions experiments;
  PacketStoreOptions packets;
  SessionsOptions sessions;
};

Config ConfigOf(const v1::ServerConfig& config);

ModelSource FromProto(const v1::ModelSource& source);

}  // namespace epikv
