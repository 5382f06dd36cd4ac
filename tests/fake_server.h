#pragma once

#include <grpcpp/create_channel.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "runtime/engine.h"
#include "runtime/engine_thread.h"
#include "server/admin_service.h"
#include "server/courier.h"
#include "server/experiments/experiments.h"
#include "server/experiments/shadow.h"
#include "server/grpc_port.h"
#include "server/metrics.h"
#include "server/models.h"
#include "server/server.h"
#include "server/settings.h"
#include "tests/fake_executor.h"
#include "tests/fake_model.h"

namespace epikv {

inline constexpr absl::Duration kGenerous = absl::Seconds(120);  // only a broken test waits so long

// What the engine has said, for tests that wait for a state.
class WatchedObserver final : public EngineObserver {
 public:
  explicit WatchedObserver(EngineObserver& metrics) : metrics_(metrics) {}

  void OnAdmitted(const Request& request, absl::Duration queued, int64_t cached) override {
    metrics_.OnAdmitted(request, queued, cached);
  }
  void OnFirstToken(const Request& request, absl::Duration since) override {
    metrics_.OnFirstToken(request, since);
  }
  void OnEvicted(const EvictedStats& evicted) override { metrics_.OnEvicted(evicted); }
  void OnStep(const StepStats& step) override {
    metrics_.OnStep(step);
    absl::MutexLock lock(&mu_);
    last_ = step;
  }
  void OnFinished(const Request& request, const Finished& finished) override {
    metrics_.OnFinished(request, finished);
    absl::MutexLock lock(&mu_);
    last_.reset();  // it no longer says how things are
  }

  // Until some step, or some attempt at one, is as wanted. False: it never was.
  bool AwaitStep(std::function<bool(const StepStats&)> wanted, absl::Duration timeout = kGenerous) {
    absl::MutexLock lock(&mu_);
    auto is_so = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      return last_.has_value() && wanted(*last_);
    };
    return mu_.AwaitWithTimeout(absl::Condition(&is_so), timeout);
  }

 private:
  EngineObserver& metrics_;
  absl::Mutex mu_;
  std::optional<StepStats> last_ ABSL_GUARDED_BY(mu_);  // absent: out of date
};

struct FakeServerOptions {
  Manifest manifest = FakeManifest();
  int64_t word_bytes = 0;  // see FakeTokenizerJson
  std::string chat_json = kFakeChatJson;
  int64_t kv_capacity_tokens = 16384;
  EngineOptions engine;  // its capacity is set from kv_capacity_tokens
  QueueLimits queue;
  OutboxLimits outbox;
  std::string default_policy;
  TransportLimits transport;
  TlsFiles tls;
  AuthOptions auth;
  std::string access_log;
  Participation* participation = nullptr;  // outlives the server
  // Kept in a folder of this name, which is there; empty: none.
  std::string experiments;
  absl::Duration series_outlive = absl::Minutes(10);  // of experiments
  std::optional<ShadowOptions> shadow;                // absent: nothing is replayed
  ShadowObserver* shadow_observer = nullptr;          // outlives the server; null: its experiments
};

// The whole server but torch: the real services, engine and metrics over a FakeExecutor, on a
// loopback port.
class FakeServer {
 public:
  explicit FakeServer(FakeServerOptions options = {},
                      std::shared_ptr<FakeScript> script = std::make_shared<FakeScript>())
      : script_(std::move(script)),
        metrics_({.policies = FakeCatalog(), .lifecycle = &lifecycle_}),
        series_(*metrics_.OfModel(options.manifest.name)),
        engine_metrics_(series_,
                        {.kv = {.lanes = 4, .bytes_per_token = kFakeBytesPerToken},
                         .kv_capacity_bytes = options.kv_capacity_tokens * kFakeBytesPerToken}),
        observer_(engine_metrics_),
        auth_(*Authenticator::Create(options.auth)),
        access_log_(*AccessLog::Open(
            options.access_log, [this](int64_t lines) { metrics_.OnAccessLogDropped(lines); })),
        experiments_(Open(options)),
        courier_(options.outbox.stall / 4),
        models_(lifecycle_),
        settings_(FakeSettings(),
                  [this](const Config& next) { return Apply(next.serving, *model_); }),
        admin_(models_, lifecycle_, settings_, frontend_,
               [this, options](const ModelSource& source) { return Load(options, source); }) {
    models_.Put(Make(options));
    if (options.shadow.has_value()) {
      ShadowObserver& observer =
          options.shadow_observer != nullptr ? *options.shadow_observer : *experiments_;
      shadow_ = std::make_unique<Shadow>(*options.shadow, models_, observer);
    }
    lifecycle_.SetState(ServerState::kServing);
    server_ =
        *Server::Start({.port = {.transport = options.transport, .tls = options.tls},
                        .outbox = options.outbox,
                        .participation = options.participation != nullptr ? options.participation
                                                                          : experiments_.get(),
                        .experiments = experiments_.get(),
                        .shadow = shadow_.get()},
                       models_, lifecycle_, courier_, frontend_);
    admin_port_ = *GrpcPort::Open({.transport = options.transport}, {&admin_},
                                  {"", "epikv.v1.AdminService"}, lifecycle_);
  }
  ~FakeServer() {
    models_.Drain(absl::InfinitePast());
    server_->AwaitStreams(absl::Now() + kGenerous);
    server_->Close();
    admin_port_->Close();
  }

  std::function<void()> on_load;  // before a model is made; set before calls
  ModelSource last_load;          // of the loader's thread

  std::string address() const { return absl::StrCat("127.0.0.1:", server_->port()); }
  // A connection of its own.
  std::shared_ptr<grpc::Channel> Connect() const { return ConnectTo(address()); }
  std::shared_ptr<grpc::Channel> ConnectAdmin() const {
    return ConnectTo(absl::StrCat("127.0.0.1:", admin_port_->port()));
  }
  static std::shared_ptr<grpc::Channel> ConnectTo(const std::string& address) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);  // windows stay at 64 KiB
    return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  }

  // Whether the engine came to hold nothing: no request, no KV used, none reserved.
  bool AwaitEmpty() {
    return observer_.AwaitStep([](const StepStats& step) {
      return step.running == 0 && step.waiting == 0 && step.kv_used_bytes == 0 &&
             step.kv_reserved_bytes == 0;
    });
  }

  FakeScript& script() { return *script_; }
  const Admission& admission() const { return *model_->admission; }
  const Metrics& metrics() const { return metrics_; }
  WatchedObserver& observer() { return observer_; }
  EngineThread& engine() { return *model_->engine; }
  const Frontend& frontend() const { return frontend_; }
  Lifecycle& lifecycle() { return lifecycle_; }
  Models& models() { return models_; }
  AdminService& admin() { return admin_; }
  Server& server() { return *server_; }
  Experiments& experiments() { return *experiments_; }

  // A model over a FakeExecutor with the same script, watched by the same observer.
  ModelPtr Make(const FakeServerOptions& options, const ModelSource& source = {}) {
    auto model = std::make_shared<ServedModel>();
    model->source = source;
    const int64_t capacity = options.kv_capacity_tokens * kFakeBytesPerToken;
    model->name = options.manifest.name;
    model->tokenizer = *Tokenizer::FromJson(FakeTokenizerJson(options.word_bytes));
    model->chat = *ChatFormats::FromJson(options.chat_json);
    model->constraints =
        std::make_unique<ConstraintCompiler>(*model->tokenizer, options.manifest.vocab_size);
    model->admission = std::make_unique<Admission>(
        options.manifest, FakeCatalog(),
        AdmissionLimits{.kv_capacity_bytes = capacity,
                        .prefill_chunk_tokens = options.engine.scheduler.prefill_chunk_tokens,
                        .defaults = {.policy = options.default_policy}});
    model->kv_capacity_bytes = capacity;
    model->threads = 1;
    model->device = "cpu";
    model->decode_kernel = "fake";
    model->metrics = series_;
    EngineOptions engine = options.engine;
    engine.kv_capacity_bytes = capacity;
    model->engine = std::make_unique<EngineThread>(
        std::make_unique<Engine>(engine,
                                 std::make_unique<FakeExecutor>(script_, kFakeBytesPerToken),
                                 *model->tokenizer, observer_),
        options.queue, nullptr);
    if (model_ == nullptr) model_ = model;
    return model;
  }

 private:
  static v1::ServerConfig FakeSettings() {
    return std::get<Run>(*ParseCommandLine({"--model=m"})).config;
  }
  std::unique_ptr<Experiments> Open(const FakeServerOptions& options) {
    const std::string& folder = options.experiments;
    if (folder.empty()) return nullptr;
    return *Experiments::Open({.store = folder + "/store.db",
                               .spool = folder + "/spool",
                               .judge_every = absl::Milliseconds(20),
                               .series_outlive = options.series_outlive},
                              metrics_, log_);
  }
  // Any file is a model like the first, but one called "missing".
  absl::StatusOr<ModelPtr> Load(FakeServerOptions options, const ModelSource& source) {
    if (source.path == "missing") return absl::NotFoundError("no such file: missing");
    options.manifest.name = source.name;
    last_load = source;
    if (on_load) on_load();
    return Make(options, source);
  }

  const std::shared_ptr<FakeScript> script_;
  Lifecycle lifecycle_;
  Metrics metrics_;
  const std::shared_ptr<ModelMetrics> series_;
  EngineMetrics engine_metrics_;
  WatchedObserver observer_;
  const std::unique_ptr<Authenticator> auth_;
  const std::unique_ptr<AccessLog> access_log_;
  Traffic traffic_;
  const Frontend frontend_{
      .auth = *auth_, .metrics = metrics_, .access_log = *access_log_, .traffic = traffic_};
  const Log log_{LogLevel::kError};
  const std::unique_ptr<Experiments> experiments_;  // null: none
  Courier courier_;
  Models models_;
  ModelPtr model_;                  // the first
  std::unique_ptr<Shadow> shadow_;  // null: nothing is replayed
  Settings settings_;
  AdminService admin_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<GrpcPort> admin_port_;
};

// Holds the engine's thread at a chosen point until the test lets it go.
class Gate {
 public:
  ~Gate() { Open(); }
  // Of the engine's thread. `here`: whether this is the point.
  void Pass(bool here) {
    absl::MutexLock lock(&mu_);
    if (!here || open_) return;
    held_ = true;
    mu_.Await(absl::Condition(&open_));
    held_ = false;
  }
  // Until the engine is held. False: not in this time.
  bool AwaitHeld(absl::Duration timeout = kGenerous) {
    absl::MutexLock lock(&mu_);
    return mu_.AwaitWithTimeout(absl::Condition(&held_), timeout);
  }
  void Open() {
    absl::MutexLock lock(&mu_);
    open_ = true;
  }

 private:
  absl::Mutex mu_;
  bool open_ ABSL_GUARDED_BY(mu_) = false;
  bool held_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace epikv
