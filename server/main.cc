#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <google/protobuf/stubs/logging.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "nlohmann/json.hpp"
#include "runtime/admission.h"
#include "runtime/engine.h"
#include "runtime/engine_thread.h"
#include "runtime/runtime.h"
#include "runtime/tokenizer.h"
#include "server/config.h"
#include "server/courier.h"
#include "server/metrics.h"
#include "server/metrics_server.h"
#include "server/server.h"

// The daemon: flags, model, engine, ports; then serving, until a signal ends it in order.

namespace epikv {
namespace {

// Tells people on stderr what happens, and since when.
class StartLog {
 public:
  void Say(absl::string_view line) const {
    std::cerr << absl::StrFormat("[%6.1f s] ", absl::ToDoubleSeconds(elapsed())) << line
              << std::endl;
  }
  absl::Duration elapsed() const { return absl::Now() - start_; }

 private:
  const absl::Time start_ = absl::Now();
};

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
void Announce(const Config& config, const ServedModel& model, const Server& server,
              const MetricsServer* metrics) {
  nlohmann::ordered_json line;
  line["grpc"] = AddressOf(config.listen, server.port());
  line["metrics"] = metrics == nullptr ? "" : AddressOf(config.metrics_listen, metrics->port());
  line["model"] = model.name;
  line["kv_capacity_tokens"] = model.kv_capacity_tokens();
  line["threads"] = model.threads;
  line["decode_kernel"] = model.decode_kernel;
  std::cout << line.dump() << std::endl;
}

absl::StatusOr<LoadedModel> Load(const Config& config, const StartLog& log) {
  RuntimeOptions options = config.runtime;
  options.progress = [&log](absl::string_view stage) { log.Say(stage); };
  absl::StatusOr<LoadedModel> loaded = LoadModel(options);
  if (!loaded.ok()) return loaded;
  for (const std::string& line : loaded->description) log.Say(line);
  if (absl::Status status = CheckDefaultPolicy(config, loaded->policies); !status.ok()) {
    return status;
  }
  return loaded;
}

// Settings that explain how a daemon behaves; what has a series of its own is not among them.
prometheus::Labels LabelsOf(const Config& config) {
  return {{"max_step_tokens", absl::StrCat(config.scheduler.max_step_tokens)},
          {"prefill_chunk_tokens", absl::StrCat(config.scheduler.prefill_chunk_tokens)},
          {"max_running_requests", absl::StrCat(config.max_running_requests)},
          {"max_queued_requests", absl::StrCat(config.queue.max_requests)},
          {"max_queued_tokens", absl::StrCat(config.queue.max_tokens)},
          {"default_max_output_tokens", absl::StrCat(config.default_max_output_tokens)},
          {"default_policy", config.default_policy},
          {"default_equal_protection", config.default_equal_protection ? "true" : "false"},
          {"deterministic", config.runtime.deterministic ? "true" : "false"}};
}

absl::StatusOr<std::unique_ptr<Metrics>> MakeMetrics(const Config& config, const ServedModel& model,
                                                     const StartLog& log) {
  const Admission& admission = model.admission;
  return Metrics::Create({.model = model.name,
                          .architecture = admission.manifest().architecture,
                          .dtype = std::string(DTypeName(admission.manifest().dtype)),
                          .decode_kernel = model.decode_kernel,
                          .policies = admission.catalog(),
                          .lanes = admission.shape().num_layers * admission.shape().num_kv_heads,
                          .kv_bytes_per_token = admission.kv_bytes_per_token(),
                          .kv_capacity_bytes = model.kv_capacity_bytes,
                          .max_running_requests = config.max_running_requests,
                          .threads = model.threads,
                          .model_load = log.elapsed(),
                          .max_series = config.metrics_max_series,
                          .config = LabelsOf(config)});
}

// Health first, so that balancers turn away; then new requests; then what runs, within the cap.
void Drain(const Config& config, Server& server, EngineThread& engine, Metrics& metrics,
           const StartLog& log) {
  const absl::Time deadline = absl::Now() + config.drain;
  log.Say(absl::StrCat("stopping: running streams may go on for ",
                       absl::FormatDuration(config.drain), "; a second signal ends at once"));
  server.StopAdvertising();
  metrics.OnDraining();
  engine.Drain(deadline);
  server.Shutdown(deadline);
  log.Say("stopped");
}

absl::Status Serve(const Config& config, const StartLog& log, Signals& signals) {
  if (absl::Status status = Server::CheckAddress(config.listen); !status.ok()) return status;
  // Never stopped: that takes the library two seconds, and the process ends anyway.
  static auto& metrics_server = *new std::unique_ptr<MetricsServer>;
  if (!config.metrics_listen.empty()) {
    auto started = MetricsServer::Start(config.metrics_listen);
    if (!started.ok()) return started.status();
    metrics_server = *std::move(started);
  }

  absl::StatusOr<LoadedModel> loaded = Load(config, log);
  if (!loaded.ok()) return loaded.status();
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer =
      Tokenizer::FromJson(loaded->tokenizer_json);
  if (!tokenizer.ok()) return tokenizer.status();
  const Admission admission(loaded->manifest, loaded->shape, loaded->policies,
                            {.kv_capacity_bytes = loaded->kv_capacity_bytes,
                             .prefill_chunk_tokens = config.runtime.prefill_chunk_tokens,
                             .default_max_output_tokens = config.default_max_output_tokens,
                             .default_policy = config.default_policy,
                             .default_equal_protection = config.default_equal_protection});
  const ServedModel model{
      .name = config.model_name.empty() ? loaded->manifest.name : config.model_name,
      .admission = admission,
      .tokenizer = **tokenizer,
      .kv_capacity_bytes = loaded->kv_capacity_bytes,
      .threads = loaded->threads,
      .decode_kernel = loaded->decode_kernel,
      .deterministic = config.runtime.deterministic};

  absl::StatusOr<std::unique_ptr<Metrics>> metrics = MakeMetrics(config, model, log);
  if (!metrics.ok()) return metrics.status();
  if (metrics_server != nullptr) metrics_server->Serve(**metrics);
  Courier courier(config.outbox.stall / 4);
  EngineThread engine(
      std::make_unique<Engine>(
          EngineOptions{.scheduler = config.scheduler,
                        .queue = config.queue_rule,
                        .refuse_infeasible_deadlines = config.refuse_infeasible_deadlines,
                        .kv_capacity_bytes = loaded->kv_capacity_bytes,
                        .max_running_requests = config.max_running_requests},
          std::move(loaded->executor), **tokenizer, **metrics),
      config.queue, loaded->on_engine_thread_start);
  absl::StatusOr<std::unique_ptr<Server>> server =
      Server::Start({.listen = config.listen,
                     .max_message_bytes = config.max_message_bytes,
                     .reflection = config.reflection,
                     .outbox = config.outbox},
                    model, engine, courier, **metrics);
  if (!server.ok()) return server.status();

  signals.Serve();
  log.Say("serving");
  Announce(config, model, **server, metrics_server.get());
  signals.AwaitStop();
  Drain(config, **server, engine, **metrics, log);
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
  static Signals signals;  // its thread outlives main
  const absl::Status status = Serve(std::get<Config>(*command), StartLog(), signals);
  if (status.ok()) return 0;
  std::cerr << "epikvd: " << status.message() << std::endl;
  return 1;
}

}  // namespace
}  // namespace epikv

int main(int argc, char** argv) {
  const int status = epikv::Main({argv + 1, argv + argc});
  // All has ended in order. LibTorch's static destructors would take another second, while the
  // threads of /metrics still answer.
  std::_Exit(status);
}
