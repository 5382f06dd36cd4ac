#pragma once

#include <grpcpp/support/status.h>
#include <prometheus/collectable.h>
#include <prometheus/registry.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "policies/spec.h"
#include "runtime/observer.h"
#include "server/metric_families.h"
#include "server/process_metrics.h"
#include "server/request_series.h"
#include "server/step_series.h"

namespace epikv {

struct MetricsOptions {
  std::string model;
  std::string architecture, dtype, decode_kernel;
  PolicyCatalog policies;
  int64_t lanes = 1;               // layers x KV heads
  int64_t kv_bytes_per_token = 1;  // K and V of all lanes
  int64_t kv_capacity_bytes = 0;
  int64_t max_running_requests = 256;
  int64_t threads = 1;         // of the engine
  absl::Duration model_load;   // how long it took
  int64_t max_series = 20000;  // that /metrics may hold
  prometheus::Labels config;   // settings worth seeing beside the rest, by name
};

// Everything that Prometheus may scrape. The engine pushes values once per step and a scrape reads
// them under locks of their own, so it is answered while a step runs.
//
// Every label takes its values from a closed set, so the number of series is bounded; Create
// refuses a bound over max_series.
class Metrics final : public EngineObserver {
 public:
  static absl::StatusOr<std::unique_ptr<Metrics>> Create(const MetricsOptions& options);

  // Of the engine's thread.
  void OnAdmitted(const Request& request, absl::Duration queued) override;
  void OnStep(const StepStats& step) override;
  void OnFirstToken(const Request& request, absl::Duration since_arrival) override;
  void OnEvicted(const EvictedStats& evicted) override;
  void OnFinished(const Request& request, const Finished& finished) override;

  // Any thread.
  void OnRpcFinished(absl::string_view method, grpc::StatusCode code);  // "GenerationService/Score"
  void OnRejected(absl::string_view reason);                            // ErrorInfo.reason
  void OnStreamWasFull(absl::Duration full);
  void OnDraining();
  void OnAccessLogDropped(int64_t lines);
  void OnTokensReloadFailed();

  // Most series that a scrape can hold.
  int64_t series_bound() const { return declare_.bound(); }
  std::vector<std::shared_ptr<prometheus::Collectable>> collectables() const;

 private:
  explicit Metrics(const MetricsOptions& options);
  void AddInfo(const MetricsOptions& options);

  // Shared with the HTTP server, which may be answering when it ends.
  const std::shared_ptr<prometheus::Registry> registry_ = std::make_shared<prometheus::Registry>();
  const std::shared_ptr<EngineGauges> gauges_;
  const std::shared_ptr<ProcessMetrics> process_ = std::make_shared<ProcessMetrics>();
  Declarations declare_;
  RequestSeries requests_;
  StepSeries steps_;
  HistogramFamily stream_full_;
  prometheus::Family<prometheus::Counter>&rpcs_, &rejected_;
  prometheus::Gauge& draining_;
  prometheus::Counter &log_dropped_, &reload_failures_;
  std::set<absl::string_view> evicting_;  // policies, in the step that runs
};

}  // namespace epikv
