#include "server/metrics/metrics.h"

#include <openssl/sha.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/errors.h"
#include "server/messages/param_values.h"
#include "server/port/tls.h"

namespace epikv {
namespace {

constexpr absl::string_view kMethods[] = {"GenerationService/Generate",
                                          "GenerationService/GenerateOnce",
                                          "GenerationService/Score",
                                          "GenerationService/CancelRequest",
                                          "TokenizationService/Tokenize",
                                          "TokenizationService/Detokenize",
                                          "TokenizationService/ApplyChatTemplate",
                                          "ModelService/ListModels",
                                          "ModelService/GetModel",
                                          "ModelService/GetTokenizer",
                                          "PolicyService/ListPolicies",
                                          "PolicyService/GetPolicy",
                                          "PacketService/CreatePacket",
                                          "PacketService/ListPackets",
                                          "PacketService/DeletePacket",
                                          "ExperimentService/ListExperiments",
                                          "ExperimentService/GetExperiment",
                                          "ExperimentService/CreateExperiment",
                                          "ExperimentService/UpdateExperiment",
                                          "ExperimentService/StartExperiment",
                                          "ExperimentService/StopExperiment",
                                          "ExperimentService/GetExperimentReport",
                                          "ExperimentService/PlanExperiment",
                                          "ExperimentService/RecordOutcome",
                                          "ExperimentService/BatchRecordOutcomes",
                                          "VllmEngine/Generate",
                                          "VllmEngine/HealthCheck",
                                          "VllmEngine/Abort",
                                          "VllmEngine/GetModelInfo",
                                          "VllmEngine/GetServerInfo",
                                          "VllmEngine/GetLoads",
                                          "VllmEngine/GetTokenizer",
                                          "OpenRcaService/StreamCoreMetrics",
                                          "AdminService/GetServerStatus",
                                          "AdminService/GetLoad",
                                          "AdminService/ListActiveRequests",
                                          "AdminService/Drain",
                                          "AdminService/Resume",
                                          "AdminService/GetConfig",
                                          "AdminService/UpdateConfig",
                                          "AdminService/LoadModel",
                                          "AdminService/UnloadModel",
                                          "AdminService/FlushPrefixCache",
                                          "AdminService/DumpState",
                                          "other"};
constexpr size_t kNumCodes = 17;
constexpr absl::string_view kSessionStarts[] = {"whole", "episode", "anew"};
// exposer_*, the HTTP library's own.
constexpr int64_t kNumExposerSeries = 7;

// Differs where parameters of two builds differ. Not their defaults that depend on the model.
std::string ConfigHash(const PolicySpec& spec) {
  std::string text;
  for (const ParamSpec& param : spec.params) {
    absl::StrAppend(&text, param.name, " ", ParamTypeName(param.type), " ", param.min, " ",
                    param.max, " ", absl::StrJoin(param.choices, ","), " ",
                    param.fallback.has_value() ? ToValue(*param.fallback).ShortDebugString() : "",
                    "\n");
  }
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest;
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()).substr(0, 6));
}

}  // namespace

// Outlives the metrics where the HTTP server is slow to let go, and is empty then.
class Metrics::Page final : public prometheus::Collectable {
 public:
  explicit Page(const Metrics& metrics) : metrics_(&metrics) {}

  void Close() {
    absl::MutexLock lock(&mu_);
    metrics_ = nullptr;
  }
  std::vector<prometheus::MetricFamily> Collect() const override {
    absl::MutexLock lock(&mu_);
    return metrics_ == nullptr ? std::vector<prometheus::MetricFamily>() : metrics_->Collect();
  }

 private:
  mutable absl::Mutex mu_;
  const Metrics* metrics_ ABSL_GUARDED_BY(mu_);
};

Metrics::Metrics(const MetricsOptions& options)
    : budget_(options.max_series),
      declare_(registry_, {}),
      model_unknown_(registry_, {{"model", ""}}),
      stream_full_(declare_, "epikv_stream_write_stall_seconds",
                   "How long a stream's outbox was full because its client read slowly.", 1,
                   Decades(.001, 100)),
      rpcs_(declare_.Counters("epikv_grpc_requests_total", "RPCs that have ended.",
                              std::size(kMethods) * kNumCodes)),
      rejected_(model_unknown_),
      lifecycle_(options.lifecycle),
      tls_certificate_(options.tls_certificate),
      connections_(options.connections),
      config_(declare_.Gauges("epikv_config_info", "Always 1. The labels are settings.", 1)),
      draining_(
          declare_.Gauges("epikv_drain_state", "1 while new requests are refused.", 1).Add({})),
      bound_(declare_
                 .Gauges("epikv_metrics_series",
                         "Most series that this page can hold with the models and policies in use. "
                         "Compare with metrics_max_series.",
                         1)
                 .Add({})),
      certificate_expiry_(
          declare_
              .Gauges("epikv_tls_certificate_expiry_timestamp_seconds",
                      "When the certificate of the gRPC ports ends, in seconds since 1970; +Inf: "
                      "they have none.",
                      1)
              .Add({})),
      packet_count_(
          declare_.Gauges("epikv_packets", "Packets that are kept, of all models.", 1).Add({})),
      packet_memory_(declare_
                         .Gauges("epikv_packet_memory_bytes",
                                 "Bytes of packets in memory, those that requests are about to "
                                 "leave included.",
                                 1)
                         .Add({})),
      packet_folder_(declare_
                         .Gauges("epikv_packet_folder_bytes",
                                 "Bytes of the packets in packet_dir, 0 where there is none.", 1)
                         .Add({})),
      session_count_(
          declare_.Gauges("epikv_sessions", "Conversations whose episodes are kept.", 1).Add({})),
      session_bytes_(
          declare_.Gauges("epikv_session_bytes", "Bytes of the episodes of sessions.", 1).Add({})),
      session_updates_(declare_.Counters(
          "epikv_session_updates_total",
          "Times that a session's episodes were to be made, or brought up to what has been said.",
          2)),
      session_updated_(session_updates_.Add({{"result", "done"}})),
      session_failed_(session_updates_.Add({{"result", "failed"}})),
      session_requests_(declare_.Counters(
          "epikv_session_requests_total",
          "Requests of sessions by what they began with. whole: their prompt, which is within the "
          "budget; episode: an episode of what was said; anew: their prompt, evicted to the "
          "budget.",
          std::size(kSessionStarts))),
      log_dropped_(
          declare_
              .Counters("epikv_access_log_dropped_total",
                        "Access log lines that were lost because the log could not take them.", 1)
              .Add({})),
      reload_failures_(declare_
                           .Counters("epikv_auth_reload_failures_total",
                                     "Changes of auth_tokens_file that were refused.", 1)
                           .Add({})),
      page_(std::make_shared<Page>(*this)) {
  AddInfo(options);
}

Metrics::~Metrics() { page_->Close(); }

void Metrics::AddInfo(const MetricsOptions& options) {
  declare_
      .Gauges("epikv_build_info",
              "Always 1. The labels are versions: of epikv, and of what it runs on.", 1)
      .Add(With(options.build, "version", EPIKV_VERSION))
      .Set(1);
  SetConfig(options.config);
  constexpr ServerState kStates[] = {ServerState::kStarting, ServerState::kServing,
                                     ServerState::kDraining};
  auto& states = declare_.Gauges("epikv_lifecycle_state",
                                 "1 for what the daemon is doing, 0 for the other states.",
                                 std::size(kStates));
  for (const ServerState state : kStates) {
    states_[state] = &states.Add({{"state", absl::AsciiStrToLower(ServerStateName(state))}});
  }
  certificate_expiry_.Set(std::numeric_limits<double>::infinity());
  auto& policies = declare_.Gauges("epikv_policy_info",
                                   "Always 1. One series for each policy of this build. "
                                   "config_hash: a hash of its parameters, defaults and ranges.",
                                   options.policies.size());
  for (const PolicySpec* spec : options.policies) {
    policies
        .Add({{"policy", std::string(spec->name)},
              {"version", EPIKV_VERSION},
              {"config_hash", ConfigHash(*spec)},
              {"evaluation_only", spec->evaluation_only ? "true" : "false"}})
        .Set(1);
  }
  declare_.Count(ProcessMetrics::kNumSeries + kNumExposerSeries);
  declare_.Count(connections_.size() * (1 + std::size(kRefusals)));
  // Without these there is no page: never refused.
  budget_.Take(std::min(budget_.limit(), declare_.bound() + model_unknown_.bound()));
}

absl::StatusOr<std::shared_ptr<ModelMetrics>> Metrics::OfModel(const std::string& model) {
  absl::MutexLock lock(&mu_);
  std::weak_ptr<ModelMetrics>& known = models_[model];
  if (std::shared_ptr<ModelMetrics> live = known.lock()) return live;
  absl::StatusOr<std::shared_ptr<ModelMetrics>> made = ModelMetrics::Create(model, budget_);
  if (made.ok()) known = *made;
  return made;
}

std::vector<std::shared_ptr<ModelMetrics>> Metrics::LiveModels() const {
  std::vector<std::shared_ptr<ModelMetrics>> models;
  absl::MutexLock lock(&mu_);
  for (const auto& [name, known] : models_) {
    if (auto model = known.lock()) models.push_back(std::move(model));
  }
  return models;
}

ExperimentSeries& Metrics::OfExperiments() {
  absl::MutexLock lock(&mu_);
  if (experiments_ == nullptr) {
    experiments_ = std::make_unique<ExperimentSeries>(budget_);
    budget_.Take(std::min(budget_.limit() - budget_.taken(), experiments_->own_series()));
  }
  return *experiments_;
}

void Metrics::KeepArms(const std::set<std::string, std::less<>>& arms) {
  for (const std::shared_ptr<ModelMetrics>& model : LiveModels()) model->KeepArms(arms);
}

void Metrics::SetPackets(std::function<PacketGauges()> usage) {
  absl::MutexLock lock(&mu_);
  packets_ = std::move(usage);
}

void Metrics::SetSessions(std::function<SessionGauges()> usage) {
  absl::MutexLock lock(&mu_);
  sessions_ = std::move(usage);
}

void Metrics::OnSessionRequest(SessionStart start) {
  session_requests_.Add({{"start", std::string(kSessionStarts[static_cast<int>(start)])}})
      .Increment();
}

void Metrics::SetKeptGauges() const {
  absl::MutexLock lock(&mu_);
  if (packets_ != nullptr) {
    const PacketGauges now = packets_();
    packet_count_.Set(static_cast<double>(now.packets));
    packet_memory_.Set(static_cast<double>(now.memory_bytes));
    packet_folder_.Set(static_cast<double>(now.folder_bytes));
  }
  if (sessions_ != nullptr) {
    const SessionGauges now = sessions_();
    session_count_.Set(static_cast<double>(now.sessions));
    session_bytes_.Set(static_cast<double>(now.bytes));
    session_updated_.Increment(static_cast<double>(now.updated) - session_updated_.Value());
    session_failed_.Increment(static_cast<double>(now.failed) - session_failed_.Value());
  }
}

std::vector<prometheus::MetricFamily> Metrics::Collect() const {
  bound_.Set(static_cast<double>(series_bound()));
  SetStates();
  SetKeptGauges();
  const std::vector<std::shared_ptr<ModelMetrics>> models = LiveModels();
  std::vector<prometheus::MetricFamily> families;
  auto add = [&families](std::vector<prometheus::MetricFamily> more) {
    families.insert(families.end(), std::make_move_iterator(more.begin()),
                    std::make_move_iterator(more.end()));
  };
  add(registry_.Collect());
  add(process_.Collect());
  add(CollectConnections());
  for (const auto& model : models) add(model->Collect());
  {
    absl::MutexLock lock(&mu_);
    if (experiments_ != nullptr) add(experiments_->Collect());
  }
  return MergedByName(std::move(families));
}

void Metrics::SetStates() const {
  if (lifecycle_ != nullptr) {
    const ServerState now = lifecycle_->state();
    draining_.Set(now == ServerState::kDraining ? 1 : 0);
    for (const auto& [state, gauge] : states_) gauge->Set(state == now ? 1 : 0);
  }
  if (tls_certificate_.empty()) return;
  const FileVersion version = VersionOf(tls_certificate_);
  absl::MutexLock lock(&mu_);
  if (version == certificate_version_) return;
  certificate_version_ = version;
  // A file that cannot be read leaves what connections are made with, and what was told of it.
  const absl::StatusOr<absl::Time> expiry = CertificateExpiry(tls_certificate_);
  if (expiry.ok()) certificate_expiry_.Set(Seconds(*expiry - absl::UnixEpoch()));
}

std::vector<prometheus::MetricFamily> Metrics::CollectConnections() const {
  prometheus::MetricFamily live{.name = "epikv_connections",
                                .help = "Open connections of a gRPC port.",
                                .type = prometheus::MetricType::Gauge,
                                .metric = {}};
  prometheus::MetricFamily refused{
      .name = "epikv_connections_refused_total",
      .help =
          "Connections of a gRPC port that the daemon closed. When they came, port_limit: the port "
          "had as many as it may; peer_limit: the peer had; descriptors: the process could open "
          "none. Later, unread_bytes: one had sent too much that is no request.",
      .type = prometheus::MetricType::Counter,
      .metric = {}};
  for (const auto& [port, connections] : connections_) {
    prometheus::ClientMetric& open = live.metric.emplace_back();
    open.label = {{"port", port}};
    open.gauge.value = static_cast<double>(connections->live());
    for (const Refused reason : kRefusals) {
      prometheus::ClientMetric& closed = refused.metric.emplace_back();
      closed.label = {{"port", port}, {"reason", std::string(RefusedName(reason))}};
      closed.counter.value = static_cast<double>(connections->refused(reason));
    }
  }
  if (connections_.empty()) return {};
  return {std::move(live), std::move(refused)};
}

void Metrics::OnRpcFinished(absl::string_view method, grpc::StatusCode code) {
  rpcs_
      .Add({{"method", std::string(KnownOr(kMethods, method, "other"))},
            {"code", std::string(CodeName(code))}})
      .Increment();
}

void Metrics::OnStreamWasFull(absl::Duration full) { stream_full_.Of({}).Observe(Seconds(full)); }

DaemonLoad Metrics::Load() const {
  DaemonLoad load;
  for (const std::shared_ptr<ModelMetrics>& model : LiveModels()) {
    const EngineLoad engine = model->Load();
    const StepStats& last = engine.last;
    load.running_requests += last.running;
    load.waiting_requests += last.waiting;
    load.kv_reserved_ratio = std::max(load.kv_reserved_ratio, engine.kv_reserved_ratio);
    if (last.predicted_wait.has_value()) {
      load.predicted_wait =
          std::max(load.predicted_wait.value_or(absl::ZeroDuration()), *last.predicted_wait);
    }
  }
  return load;
}

std::shared_ptr<prometheus::Collectable> Metrics::page() const { return page_; }

void Metrics::SetConfig(const prometheus::Labels& config) {
  absl::MutexLock lock(&mu_);
  if (config_now_ != nullptr) config_.Remove(config_now_);
  config_now_ = &config_.Add(config);
  config_now_->Set(1);
}

void Metrics::OnAccessLogDropped(int64_t lines) {
  log_dropped_.Increment(static_cast<double>(lines));
}

void Metrics::OnTokensReloadFailed() { reload_failures_.Increment(); }

}  // namespace epikv
