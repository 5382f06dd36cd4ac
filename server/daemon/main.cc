#ifdef EPIKV_MIMALLOC
#include <mimalloc.h>
#endif
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <google/protobuf/stubs/logging.h>
#include <grpcpp/grpcpp.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "nlohmann/json.hpp"
#include "runtime/engine/core_budget.h"
#include "runtime/base/machine.h"
#include "runtime/runtime.h"
#include "server/call/access_log.h"
#include "server/daemon/admin_service.h"
#include "server/call/auth.h"
#include "server/call/call_scope.h"
#include "server/daemon/config.h"
#include "server/stream/courier.h"
#include "server/experiments/experiments.h"
#include "server/experiments/shadow.h"
#include "server/port/grpc_port.h"
#include "server/base/lifecycle.h"
#include "server/base/log.h"
#include "server/metrics/metrics.h"
#include "server/metrics/metrics_server.h"
#include "server/models/models.h"
#include "server/daemon/server.h"
#include "server/daemon/settings.h"
#include "server/call/traffic.h"

// The daemon: flags, model, engine, ports; then serving, until a signal ends it in order.

namespace epikv {
namespace {

// When what is freed goes back to the system. At once while models load: the weights as they were
// read would be the peak. Later while they serve: what one step frees the next one takes.
void ReturnFreedMemory(absl::Duration after) {
#ifdef EPIKV_MIMALLOC
  mi_option_set(mi_option_decommit_delay, absl::ToInt64Milliseconds(after));
  mi_option_set(mi_option_segment_decommit_delay, absl::ToInt64Milliseconds(after));
#endif
}

// SIGTERM and SIGINT, taken by a thread of its own. The first is an orderly stop, once Serve was
// called; any other ends the process at once. Made before all other threads, which inherit that
// the signals are blocked.
class Signals {
 public:
  Signals() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGTERM);
    sigaddset(&set_, SIGINT);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
    signal(SIGPIPE, SIG_IGN);                 // a client that has gone is an error of its write
    signal(SIGXFSZ, SIG_IGN);                 // so is a file that may not grow (`ulimit -f`)
    signal(SIGHUP, SIG_IGN);                  // log rotation sends it; files are looked at without
    std::thread([this] { Run(); }).detach();  // waits for signals until the process ends
  }

  void Serve() { serving_.Notify(); }
  void AwaitStop() const { stop_.WaitForNotification(); }

 private:
  void Run() {
    int signal = 0;
    sigwait(&set_, &signal);
    if (!serving_.HasBeenNotified()) std::_Exit(128 + signal);
    stop_.Notify();
    sigwait(&set_, &signal);
    std::_Exit(128 + signal);
  }

  sigset_t set_;
  absl::Notification serving_, stop_;
};

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

// Cores that engines may use: the quota minus one, for gRPC and the rest, or more if asked.
int64_t EngineCores(const Config& config) {
  int64_t cores = std::max({int64_t{1}, CpuQuota() - 1, config.runtime.threads});
  for (const ModelSource& source : config.models) cores = std::max(cores, source.threads);
  return cores;
}

// Loads models and puts them behind engines, as the configuration says.
class Loader {
 public:
  Loader(const Settings& settings, const Log& log, CoreBudget& cores, Metrics& metrics)
      : settings_(settings), log_(log), cores_(cores), metrics_(metrics) {}

  absl::StatusOr<ModelPtr> Load(const ModelSource& source) const {
    const absl::Time begin = absl::Now();
    const Config config = settings_.config();
    RuntimeOptions options = config.runtime;
    options.model_path = source.path;
    options.artefact_dir = source.artefact_dir;
    if (source.kv_pool_bytes > 0) options.kv_pool_bytes = source.kv_pool_bytes;
    if (source.threads > 0) options.threads = source.threads;
    options.progress = [this](absl::string_view stage) { log_.Info(stage); };
    absl::StatusOr<LoadedModel> loaded = LoadModel(options);
    if (!loaded.ok()) return loaded.status();
    for (const std::string& line : loaded->description) log_.Info(line);
    return MakeServedModel(*std::move(loaded), source, config.serving, absl::Now() - begin, cores_,
                           metrics_);
  }

 private:
  const Settings& settings_;
  const Log& log_;
  CoreBudget& cores_;
  Metrics& metrics_;
};

absl::Status LoadAll(const std::vector<ModelSource>& sources, const Loader& loader,
                     Settings& settings, Models& models) {
  for (const ModelSource& source : sources) {
    absl::StatusOr<ModelPtr> model = loader.Load(source);
    if (!model.ok()) return model.status();
    if (absl::Status status = PutInService(*model, /*replace=*/false, settings, models);
        !status.ok()) {
      return absl::Status(status.code(), absl::StrCat(source.path, ": ", status.message()));
    }
  }
  return absl::OkStatus();
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

// Health first, so that balancers turn away; then new requests; then what runs, within the cap. The
// port closes when nobody has sent a call here for a second, ten seconds later at most.
void Drain(const Settings& settings, Server& server, Models& models, const Traffic& traffic,
           const Log& log) {
  const int64_t known = traffic.events();
  const absl::Duration drain = settings.config().drain;
  const absl::Time deadline = absl::Now() + drain;
  log.Info(absl::StrCat("stopping: running streams may go on for ", absl::FormatDuration(drain),
                        "; a second signal ends at once"));
  models.Drain(deadline);
  server.AwaitStreams(deadline);
  traffic.AwaitQuiet(known, std::min(deadline - absl::Now(), absl::Seconds(10)));
  server.Close();
  log.Info("stopped");
}

absl::StatusOr<std::unique_ptr<AccessLog>> OpenAccessLog(const Config& config, Metrics& metrics,
                                                         const Log& log) {
  constexpr int64_t kSecondsBetweenWarnings = 60;
  auto warned = std::make_shared<std::atomic<int64_t>>(0);  // when
  return AccessLog::Open(config.access_log, [&metrics, &log, warned](int64_t lines) {
    metrics.OnAccessLogDropped(lines);
    const int64_t now = absl::ToUnixSeconds(absl::Now());
    int64_t before = *warned;
    if (now - before < kSecondsBetweenWarnings) return;
    if (!warned->compare_exchange_strong(before, now)) return;
    log.Warn("--access_log takes no lines, or too slowly: some are dropped, and counted");
  });
}

absl::StatusOr<std::unique_ptr<Authenticator>> MakeAuthenticator(const Config& config,
                                                                 Metrics& metrics, const Log& log) {
  auto on_reload = [&metrics, &log](const absl::Status& status) {
    if (status.ok()) return log.Info("auth_tokens_file was read again");
    metrics.OnTokensReloadFailed();
    log.Warn(absl::StrCat(status.message(), "; the tokens known before stay valid"));
  };
  return Authenticator::Create({.tokens_file = config.tokens_file, .on_reload = on_reload});
}

// Files that serving needs; known before a model takes long to load.
absl::Status CheckFiles(const Config& config) {
  const absl::Status checks[] = {
      CheckTlsFiles(config.tls),
      Authenticator::Create({.tokens_file = config.tokens_file}).status(),
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
                        " is in plain text for everyone on the way; --tls_certificate and "
                        "--tls_key would encrypt it"));
}

absl::Status Serve(const v1::ServerConfig& settled, Signals& signals) {
  const Config config = ConfigOf(settled);
  static Log& log = *new Log(config.log_level);  // gRPC's threads use it to the end
  if (absl::Status status = CheckFiles(config); !status.ok()) return status;
  WarnOfPlainText("--listen", config.listen, config.tls, log);
  WarnOfPlainText("--admin_listen", config.admin_listen, config.tls, log);
  // Ports before models: probes are answered while those are loaded.
  Lifecycle lifecycle;
  Metrics metrics({.policies = BuiltPolicies(),
                   .max_series = config.metrics_max_series,
                   .config = LabelsOf(config),
                   .build = {{"torch", TorchVersion()}, {"grpc", grpc::Version()}},
                   .lifecycle = &lifecycle});
  // Never stopped: that takes the library two seconds, and the process ends anyway.
  static auto& metrics_server = *new std::unique_ptr<MetricsServer>;
  if (!config.metrics_listen.empty()) {
    auto started = MetricsServer::Start(config.metrics_listen);
    if (!started.ok()) return started.status();
    metrics_server = *std::move(started);
    metrics_server->Serve(metrics);
  }
  absl::StatusOr<std::unique_ptr<AccessLog>> access_log = OpenAccessLog(config, metrics, log);
  if (!access_log.ok()) return access_log.status();
  const absl::StatusOr<std::unique_ptr<Authenticator>> auth =
      MakeAuthenticator(config, metrics, log);
  if (!auth.ok()) return auth.status();
  Traffic traffic;
  const Frontend frontend{
      .auth = **auth, .metrics = metrics, .access_log = **access_log, .traffic = traffic};
  CoreBudget cores(EngineCores(config));
  Courier courier(config.outbox.stall / 4);
  Models models(lifecycle);
  Settings settings(settled, [&models, &metrics](const Config& next) {
    absl::Status known = CheckDefaults(next.serving.defaults, BuiltPolicies());
    if (!known.ok()) return known;
    for (const ModelPtr& model : models.Live()) {
      if (absl::Status status = Apply(next.serving, *model); !status.ok()) return status;
    }
    metrics.SetConfig(LabelsOf(next));
    log.SetLevel(next.log_level);
    return absl::OkStatus();
  });
  const Loader loader(settings, log, cores, metrics);
  GrpcPortOptions port{.listen = config.listen,
                       .transport = config.transport,
                       .tls = config.tls,
                       .reflection = config.reflection};
  absl::StatusOr<std::unique_ptr<Experiments>> experiments = nullptr;
  if (!config.experiments.store.empty()) {
    experiments = Experiments::Open(config.experiments, metrics, log);
    if (!experiments.ok()) return experiments.status();
  }
  std::unique_ptr<Shadow> shadow;
  const ShadowOptions& replays = config.experiments.shadow;
  if (*experiments != nullptr && replays.share_of_requests > 0) {
    shadow = std::make_unique<Shadow>(replays, models, **experiments);
  }
  absl::StatusOr<std::unique_ptr<Server>> server =
      Server::Start({.port = port,
                     .outbox = config.outbox,
                     .participation = experiments->get(),
                     .experiments = experiments->get(),
                     .shadow = shadow.get()},
                    models, lifecycle, courier, frontend);
  if (!server.ok()) return server.status();
  AdminService admin(models, lifecycle, settings, frontend,
                     [&loader](const ModelSource& source) { return loader.Load(source); });
  absl::StatusOr<std::unique_ptr<GrpcPort>> admin_port = nullptr;
  if (!config.admin_listen.empty()) {
    port.listen = config.admin_listen;
    port.flag = "--admin_listen";
    port.channelz = config.channelz;
    admin_port = GrpcPort::Open(port, {&admin}, {"", "epikv.v1.AdminService"}, lifecycle);
    if (!admin_port.ok()) return admin_port.status();
  }
  log.TakeGrpc();
  log.Info(absl::StrCat("gRPC on ", AddressOf(config.listen, (*server)->port()),
                        ", not serving until the models are loaded"));

  if (absl::Status status = LoadAll(config.models, loader, settings, models); !status.ok())
    return status;
  ReturnFreedMemory(absl::Milliseconds(500));
  signals.Serve();
  lifecycle.SetState(ServerState::kServing);
  log.Info("serving");
  Announce(config, models.InService(), **server, admin_port->get(), metrics_server.get());
  signals.AwaitStop();
  Drain(settings, **server, models, traffic, log);
  const bool loading = admin.AbandonLoading();
  if (*admin_port != nullptr) (*admin_port)->Close();
  if (loading) {
    shadow.reset();
    experiments->reset();  // these write what waits
    access_log->reset();
    std::_Exit(0);
  }
  return absl::OkStatus();
}

int Main(const std::vector<std::string>& args) {
  // Services say themselves what is wrong with a request; config.cc what is wrong with a file.
  google::protobuf::SetLogHandler(nullptr);
  const absl::StatusOr<Command> command = ParseCommandLine(args);
  if (!command.ok()) {
    std::cerr << "epikvd: " << command.status().message() << std::endl;
    return 1;
  }
  if (const auto* help = std::get_if<PrintHelp>(&*command)) {
    std::cout << help->text << std::flush;
    return 0;
  }
  if (const auto* print = std::get_if<PrintConfig>(&*command)) {
    std::cout << print->text << std::flush;
    return 0;
  }
  BoundKernelCaches();
  static Signals signals;  // its thread outlives main
  const absl::Status status = Serve(std::get<Run>(*command).config, signals);
  if (status.ok()) return 0;
  std::cerr << "epikvd: " << status.message() << std::endl;
  return 1;
}

}  // namespace
}  // namespace epikv

int main(int argc, char** argv) {
  epikv::ReturnFreedMemory(absl::ZeroDuration());
  const int status = epikv::Main({argv + 1, argv + argc});
  // All has ended in order. LibTorch's static destructors would take another second, while the
  // threads of /metrics still answer.
  std::_Exit(status);
}
