#pragma once

#include <grpcpp/support/status.h>
#include <prometheus/collectable.h>
#include <prometheus/registry.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "policies/spec.h"
#include "server/base/file_contents.h"
#include "server/base/lifecycle.h"
#include "server/metrics/experiment_series.h"
#include "server/metrics/metric_families.h"
#include "server/metrics/model_metrics.h"
#include "server/metrics/process_metrics.h"
#include "server/port/connections.h"

namespace epikv {

struct MetricsOptions {
  PolicyCatalog policies;
  int64_t max_series = 30000;            // that /metrics may hold
  prometheus::Labels config;             // settings worth seeing beside the rest, by name
  prometheus::Labels build;              // versions of what the daemon runs on, by name
  const Lifecycle* lifecycle = nullptr;  // outlives the metrics
  std::string tls_certificate;           // of the gRPC ports, a PEM file; empty: none
  std::map<std::string, std::shared_ptr<const Connections>> connections;  // by port
};

struct DaemonLoad {
  // Of late, of the model whose KV pool is fullest. A balancer divides the rate of requests by it:
  // of one moment, it would be that of the request itself where there are few.
  double kv_reserved_ratio = 0;
  int64_t running_requests = 0, waiting_requests = 0;
  std::optional<absl::Duration>
      predicted_wait;  // the longest of a model; absent: none was measured
};

// Everything that Prometheus may scrape: what belongs to no model, and the models' own series.
// Engines push values once per step and a scrape reads them under locks of their own, so it is
// answered while a step runs. Thread-safe.
//
// Every label takes its values from a closed set, and the series that they can grow to are promised
// before they are made (SeriesBudget): a model that would exceed the limit is refused, a policy
// counts as "other".
class Metrics {
 public:
  explicit Metrics(const MetricsOptions& options);
  ~Metrics();

  // The series of a model, shared by all who ask while one of them lives. The error says what limit
  // they need.
  absl::StatusOr<std::shared_ptr<ModelMetrics>> OfModel(const std::string& model);

  void OnRpcFinished(absl::string_view method, grpc::StatusCode code);  // "GenerationService/Score"
  // Of a request whose model is not known. reason: of ErrorInfo.
  void OnRejected(absl::string_view reason) { rejected_.Count(reason); }
  void OnStreamWasFull(absl::Duration full);
  void SetConfig(const prometheus::Labels& config);
  void OnAccessLogDropped(int64_t lines);
  // What packets take, asked at each scrape.
  struct PacketGauges {
    int64_t packets = 0, memory_bytes = 0, folder_bytes = 0;
  };
  void SetPackets(std::function<PacketGauges()> usage);
  // The same of sessions. updated, failed: times that episodes were to be brought up to date.
  struct SessionGauges {
    int64_t sessions = 0, bytes = 0, updated = 0, failed = 0;
  };
  void SetSessions(std::function<SessionGauges()> usage);
  // What requests of sessions began with.
  enum class SessionStart { kWhole, kEpisode, kAnew };
  void OnSessionRequest(SessionStart start);
  void OnTokensReloadFailed();
  // Those of experiments, made when first asked for, once; they live as long as this.
  ExperimentSeries& OfExperiments();
  // Of all models: see ModelMetrics.
  void KeepArms(const std::set<std::string, std::less<>>& arms);

  // Most series that a scrape can hold with the models and policies that are in use.
  int64_t series_bound() const { return budget_.taken(); }
  // How full the daemon is, for balancers: of all models that live.
  DaemonLoad Load() const;
  // What an HTTP server collects; it may be answering when this ends.
  std::shared_ptr<prometheus::Collectable> page() const;

 private:
  class Page;

  void AddInfo(const MetricsOptions& options);
  std::vector<std::shared_ptr<ModelMetrics>> LiveModels() const;
  void SetKeptGauges() const;
  std::vector<prometheus::MetricFamily> Collect() const;
  std::vector<prometheus::MetricFamily> CollectConnections() const;
  void SetStates() const;

  SeriesBudget budget_;
  prometheus::Registry registry_;
  const ProcessMetrics process_;
  Declarations declare_, model_unknown_;
  HistogramFamily stream_full_;
  prometheus::Family<prometheus::Counter>& rpcs_;
  RejectedSeries rejected_;
  const Lifecycle* const lifecycle_;
  const std::string tls_certificate_;
  const std::map<std::string, std::shared_ptr<const Connections>> connections_;
  prometheus::Family<prometheus::Gauge>& config_;
  prometheus::Gauge &draining_, &bound_, &certificate_expiry_;
  std::map<ServerState, prometheus::Gauge*> states_;
  prometheus::Gauge &packet_count_, &packet_memory_, &packet_folder_;
  prometheus::Gauge &session_count_, &session_bytes_;
  prometheus::Family<prometheus::Counter>& session_updates_;
  prometheus::Counter &session_updated_, &session_failed_;
  prometheus::Family<prometheus::Counter>& session_requests_;
  prometheus::Counter &log_dropped_, &reload_failures_;
  mutable absl::Mutex mu_;
  mutable FileVersion certificate_version_ ABSL_GUARDED_BY(mu_);  // that was read last
  std::function<PacketGauges()> packets_ ABSL_GUARDED_BY(mu_);    // null: there is no store
  std::function<SessionGauges()> sessions_ ABSL_GUARDED_BY(mu_);
  prometheus::Gauge* config_now_ ABSL_GUARDED_BY(mu_) = nullptr;
  std::map<std::string, std::weak_ptr<ModelMetrics>> models_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<ExperimentSeries> experiments_ ABSL_GUARDED_BY(mu_);  // null: there are none
  const std::shared_ptr<Page> page_;
};

}  // namespace epikv
