#include "server/daemon/serve.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "nlohmann/json.hpp"
#include "runtime/base/machine.h"
#include "runtime/base/processor.h"
#include "runtime/base/steady_time.h"
#include "runtime/engine/core_budget.h"
#include "runtime/runtime.h"
#include "server/base/lifecycle.h"
#include "server/base/log.h"
#include "server/base/task_thread.h"
#include "server/call/access_log.h"
#include "server/call/auth.h"
#include "server/call/call_scope.h"
#include "server/call/traffic.h"
#include "server/daemon/admin_service.h"
#include "server/daemon/config.h"
#include "server/daemon/freed_memory.h"
#include "server/daemon/loader.h"
#include "server/daemon/server.h"
#include "server/daemon/settings.h"
#include "server/daemon/version.h"
#include "server/daemon/watchdog.h"
#include "server/experiments/experiments.h"
#include "server/experiments/shadow.h"
#include "server/metrics/metrics.h"
#include "server/metrics/metrics_server.h"
#include "server/models/models.h"
#include "server/port/connections.h"
#include "server/port/descriptors.h"
#include "server/port/grpc_port.h"
#include "server/stream/courier.h"

namespace epikv {
namespace {

std::string AddressOf(const std::string& listen, int port) {
  return absl::StrCat(listen.substr(0, listen.rfind(':')), ":", port);
}

// For programs: one line, when requests are served.
void Announce(const Config& config, const std::vector<ModelPtr>& served, const Server& server,
              const GrpcPort* admin, const MetricsServer* metrics) {
  nlohmann::ordered_json line;
  line["grpc"] = AddressOf(config.listen, server.port());
  line["metrics"] = metrics == nullptr ? "" : AddressOf(config.metrics_listen, metrics->port());
  line["admin"] = admin == nullptr ? "" : AddressOf(config.admin_listen, admin->port());
  for (const ModelPtr& model : served) {
    line["models"].push_back({{"name", model->name},
                              {"kv_capacity_tokens", model->kv_capacity_tokens()},
                              {"threads", model->threads},
                              {"device", model->device},
                              {"decode_kernel", model->decode_kernel},
                              {"prefill_kernel", model->prefill_kernel}});
  }
  std::cout << line.dump() << std::endl;
}

// Settings that explain how a daemon behaves; what has a series of its own is not among them.
prometheus::Labels LabelsOf(const Config& config) {
  const ServingOptions& serving = config.serving;
  return {{"max_step_tokens", absl::StrCat(serving.scheduler.max_step_tokens)},
          {"prefill_chunk_tokens", absl::StrCat(serving.scheduler.prefill_chunk_tokens)},
          {"max_running_requests", absl::StrCat(serving.max_running_requests)},
          {"max_queued_requests", absl::StrCat(serving.queue.max_requests)},
          {"max_queued_tokens", absl::StrCat(serving.queue.max_tokens)},
          {"default_max_output_tokens", absl::StrCat(serving.defaults.max_output_tokens)},
          {"default_policy", serving.defaults.policy},
          {"default_equal_protection", serving.defaults.equal_protection ? "true" : "false"},
          {"deterministic", serving.deterministic ? "true" : "false"}};
}

// An end that is in order takes a dozen seconds beside the streams: see Drain.
constexpr absl::Duration kMostAfterDrain = absl::Seconds(25);

// Health first, so that balancers turn away; then new requests; then what runs, within the cap. The
// port closes when nobody has sent a call here for a second, ten seconds later at most.
void Drain(const Settings& settings, Server& server, Models& models, const Traffic& traffic,
           const Log& log) {
  const int64_t known = traffic.events();
  const absl::Duration drain = settings.config().drain;
  const absl::Time deadline = SteadyNow() + drain;
  EndByForce(drain + kMostAfterDrain, log);
  log.Info(absl::StrCat("stopping: running streams may go on for ", absl::FormatDuration(drain),
                        "; a second signal stops the daemon at once"));
  models.Drain(deadline);
  server.AwaitStreams(deadline);
  traffic.AwaitQuiet(known, std::min(deadline - SteadyNow(), absl::Seconds(10)));
  server.Close();
  log.Info("stopped");
}

absl::StatusOr<std::unique_ptr<AccessLog>> OpenAccessLog(const Config& config, Metrics& metrics,
                                                         const Log& log) {
  constexpr int64_t kSecondsBetweenWarnings = 60;
  auto warned = std::make_shared<std::atomic<int64_t>>(-kSecondsBetweenWarnings);  // when
  return AccessLog::Open(config.access_log, [&metrics, &log, warned](int64_t lines) {
    metrics.OnAccessLogDropped(lines);
    const int64_t now = absl::ToInt64Seconds(SteadyTime());
    int64_t before = *warned;
    if (now - before < kSecondsBetweenWarnings) return;
    if (!warned->compare_exchange_strong(before, now)) return;
    log.Warn(
        "--access_log cannot be written, or not fast enough: some lines are lost "
        "(epikv_access_log_dropped_total counts them)");
  });
}

AuthOptions AuthOptionsOf(const Config& config) {
  return {.tokens_file = config.tokens_file, .certificates = !config.tls.client_ca.empty()};
}

absl::StatusOr<std::unique_ptr<Authenticator>> MakeAuthenticator(const Config& config,
                                                                 Metrics& metrics, const Log& log) {
  auto on_reload = [&metrics, &log](const absl::Status& status) {
    if (status.ok()) return log.Info("auth_tokens_file was read again");
    metrics.OnTokensReloadFailed();
    log.Warn(absl::StrCat(status.message(), "; the tokens known before stay valid"));
  };
  AuthOptions options = AuthOptionsOf(config);
  options.on_reload = on_reload;
  return Authenticator::Create(std::move(options));
}

// Files that serving needs; known before a model takes long to load.
absl::Status CheckFiles(const Config& config) {
  const absl::Status checks[] = {CheckTlsFiles(config.tls),
                                 Authenticator::Create(AuthOptionsOf(config)).status(),
                                 AccessLog::Open(config.access_log, [](int64_t) {}).status()};
  std::vector<absl::string_view> problems;
  for (const absl::Status& status : checks) {
    if (!status.ok()) problems.push_back(status.message());
  }
  if (problems.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(problems, "\n"));
}

void WarnOfPlainText(absl::string_view flag, const std::string& address, const TlsFiles& tls,
                     const Log& log) {
  if (address.empty() || !tls.certificate.empty() || IsLoopback(address)) return;
  log.Warn(absl::StrCat(flag, "=", address,
                        " is not encrypted: anyone on the network path can read it; set "
                        "--tls_certificate and --tls_key"));
}

// Null: metrics are not served. Never stopped: that takes the library two seconds, and the process
// ends anyway.
absl::StatusOr<const MetricsServer*> ServeMetrics(const Config& config, Metrics& metrics) {
  if (config.metrics_listen.empty()) return nullptr;
  absl::StatusOr<std::unique_ptr<MetricsServer>> started =
      MetricsServer::Start(config.metrics_listen);
  if (!started.ok()) return started.status();
  (*started)->Serve(metrics);
  return started->release();
}

// Of the two gRPC ports. Each has its own, so that clients cannot keep operators out.
struct PortConnections {
  std::shared_ptr<Connections> clients, operators;
};

PortConnections ConnectionsOf(const Config& config, const Log& log) {
  ConnectionLimits clients = config.connections;
  ConnectionLimits operators = {
      .most = 64, .most_of_peer = 32, .unread_bytes = clients.unread_bytes};
  const int64_t descriptors = RaiseDescriptorLimit();
  const int64_t room = ConnectionsWithin(descriptors);
  if (room < clients.most + operators.most) {
    operators.most = std::max<int64_t>(std::min(operators.most, room / 4), 1);
    clients.most = std::max<int64_t>(room - operators.most, 1);
    log.Warn(absl::StrCat("the process may open ", descriptors,
                          " descriptors, too few for "
                          "--max_connections=",
                          config.connections.most, ": at most ", clients.most,
                          " connections are taken; raise the limit (ulimit -n)"));
  }
  return {.clients = std::make_shared<Connections>(clients),
          .operators = std::make_shared<Connections>(operators)};
}

GrpcPortOptions PortOf(const Config& config, std::shared_ptr<Connections> connections) {
  return {.listen = config.listen,
          .transport = config.transport,
          .tls = config.tls,
          .connections = std::move(connections),
          .reflection = config.reflection};
}

// Null: there is none.
absl::StatusOr<std::unique_ptr<GrpcPort>> OpenAdminPort(const Config& config,
                                                        const PortConnections& connections,
                                                        AdminService& admin, Lifecycle& lifecycle) {
  if (config.admin_listen.empty()) return nullptr;
  GrpcPortOptions port = PortOf(config, connections.operators);
  port.listen = config.admin_listen;
  port.flag = "--admin_listen";
  port.channelz = config.channelz;
  return GrpcPort::Open(port, {&admin}, {"", "epikv.v1.AdminService"}, lifecycle);
}

// Settings that change while the daemon runs.
absl::Status Change(const Config& next, Models& models, Metrics& metrics, Log& log) {
  absl::Status known = CheckDefaults(next.serving.defaults, BuiltPolicies());
  if (!known.ok()) return known;
  for (const ModelPtr& model : models.Live()) {
    if (absl::Status status = Apply(next.serving, *model); !status.ok()) return status;
  }
  metrics.SetConfig(LabelsOf(next));
  log.SetLevel(next.log_level);
  return absl::OkStatus();
}

}  // namespace

absl::Status Serve(const v1::ServerConfig& settled, StopSignals& signals, RankProcesses* ranks) {
  const Config config = ConfigOf(settled);
  static Log& log = *new Log(config.log_level);  // gRPC's threads use it to the end
  if (ranks != nullptr) {
    ranks->Watch([&signals](const std::string& why) {
      log.Say(LogLevel::kError, absl::StrCat(why, ": the daemon stops"));
      signals.Stop();
    });
  }
  if (absl::Status status = CheckFiles(config); !status.ok()) return status;
  if (absl::Status status = LimitProcessor(config.processor); !status.ok()) {
    return absl::Status(status.code(),
                        absl::StrCat("--cpu=", settled.cpu(), ": ", status.message()));
  }
  WarnOfPlainText("--listen", config.listen, config.tls, log);
  WarnOfPlainText("--admin_listen", config.admin_listen, config.tls, log);
  if (!config.metrics_listen.empty() && !IsLoopback(config.metrics_listen)) {
    log.Warn(absl::StrCat("--metrics_listen=", config.metrics_listen,
                          " asks for no token and is not encrypted: whoever reaches it reads all "
                          "series, those of experiments too"));
  }
  const PortConnections connections = ConnectionsOf(config, log);
  // Ports before models: probes are answered while those are loaded.
  Lifecycle lifecycle;
  Metrics metrics(
      {.policies = BuiltPolicies(),
       .max_series = config.metrics_max_series,
       .config = LabelsOf(config),
       .build = {{"commit", std::string(Commit())},
                 {"torch", TorchVersion()},
                 {"grpc", grpc::Version()}},
       .lifecycle = &lifecycle,
       .tls_certificate = config.tls.certificate,
       .connections = {{"clients", connections.clients}, {"operators", connections.operators}}});
  const absl::StatusOr<const MetricsServer*> metrics_server = ServeMetrics(config, metrics);
  if (!metrics_server.ok()) return metrics_server.status();
  absl::StatusOr<std::unique_ptr<AccessLog>> access_log = OpenAccessLog(config, metrics, log);
  if (!access_log.ok()) return access_log.status();
  const absl::StatusOr<std::unique_ptr<Authenticator>> auth =
      MakeAuthenticator(config, metrics, log);
  if (!auth.ok()) return auth.status();
  Traffic traffic;
  TaskThread long_requests;
  ClientBytes answers(kMostClientBytes);
  LoadReports load_reports(metrics);
  const Frontend frontend{.auth = **auth,
                          .metrics = metrics,
                          .access_log = **access_log,
                          .traffic = traffic,
                          .long_requests = long_requests,
                          .connections = *connections.clients,
                          .answers = answers,
                          .load_reports = config.load_reports ? &load_reports : nullptr,
                          .stall = config.outbox.stall};
  const Frontend operators_frontend{.auth = frontend.auth,
                                    .metrics = metrics,
                                    .access_log = frontend.access_log,
                                    .traffic = traffic,
                                    .long_requests = long_requests,
                                    .connections = *connections.operators,
                                    .answers = answers,
                                    .stall = frontend.stall};
  CoreBudget cores(EngineCores(config));
  Courier courier(config.outbox.stall / 4);
  Models models(lifecycle);
  Settings settings(
      settled, [&](const Config& next) { return Change(next, models, metrics, log); }, log);
  const Loader loader(settings, log, cores, metrics, ranks == nullptr ? nullptr : ranks->ranks());
  absl::StatusOr<std::unique_ptr<Experiments>> experiments = nullptr;
  if (!config.experiments.store.empty()) {
    experiments = Experiments::Open(config.experiments, metrics, log);
  }
  if (!experiments.ok()) return experiments.status();
  std::unique_ptr<Shadow> shadow;
  const ShadowOptions& replays = config.experiments.shadow;
  if (*experiments != nullptr && replays.share_of_requests > 0) {
    shadow = std::make_unique<Shadow>(replays, models, **experiments);
  }
  absl::StatusOr<std::unique_ptr<PacketStore>> packets = PacketStore::Open(config.packets);
  if (!packets.ok()) return packets.status();
  Sessions sessions(config.sessions, models, log);
  const absl::Cleanup forget_kept = [&metrics] {
    metrics.SetPackets(nullptr);
    metrics.SetSessions(nullptr);
  };
  metrics.SetSessions([&sessions] { return sessions.usage(); });
  metrics.SetPackets([store = packets->get()] { return store->usage(); });
  absl::StatusOr<std::unique_ptr<Server>> server =
      Server::Start({.port = PortOf(config, connections.clients),
                     .outbox = config.outbox,
                     .participation = experiments->get(),
                     .experiments = experiments->get(),
                     .shadow = shadow.get(),
                     .shared_prefixes = config.shared_prefixes,
                     .vllm_dialect = config.vllm_dialect,
                     .packets = packets->get(),
                     .sessions = &sessions},
                    models, lifecycle, courier, frontend);
  if (!server.ok()) return server.status();
  AdminService admin(
      models, lifecycle, settings, operators_frontend, [&loader](const ModelSource& source) {
        absl::StatusOr<ModelPtr> model = loader.Load(source);
        if (model.ok()) {
          log.Info(absl::StrCat(source.path,
                                " was loaded over the port for operators; it is served until the "
                                "daemon ends: name it in the configuration to keep it"));
        }
        return model;
      });
  absl::StatusOr<std::unique_ptr<GrpcPort>> admin_port =
      OpenAdminPort(config, connections, admin, lifecycle);
  if (!admin_port.ok()) return admin_port.status();
  log.TakeGrpc();
  log.Info(absl::StrCat("gRPC listens on ", AddressOf(config.listen, (*server)->port()),
                        "; requests are refused until the models are loaded"));

  absl::Status loaded = loader.LoadAll(config.models, settings, models);
  if (!loaded.ok()) return loaded;
  ReturnFreedMemory(kFreedAfter);
  signals.Serve();
  lifecycle.SetState(ServerState::kServing);
  log.Info("serving");
  Announce(config, models.InService(), **server, admin_port->get(), *metrics_server);
  std::optional<Watchdog> watchdog;
  watchdog.emplace(WatchdogOptions{.limit = config.watchdog}, models, lifecycle, log);
  signals.AwaitStop();
  watchdog.reset();
  Drain(settings, **server, models, traffic, log);
  const bool loading = admin.AbandonLoading();
  if (*admin_port != nullptr) (*admin_port)->Close();
  if (loading) {
    shadow.reset();
    experiments->reset();  // these write what waits
    access_log->reset();
    std::_Exit(0);
  }
  const std::string failure = ranks == nullptr ? "" : ranks->ranks()->failure();
  return failure.empty() ? absl::OkStatus() : absl::InternalError(failure);
}

}  // namespace epikv
