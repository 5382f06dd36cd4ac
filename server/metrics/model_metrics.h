#pragma once

#include <prometheus/metric_family.h>
#include <prometheus/registry.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "runtime/engine/observer.h"
#include "server/metrics/metric_families.h"
#include "server/metrics/recent.h"
#include "server/metrics/rejected_series.h"
#include "server/metrics/request_series.h"
#include "server/metrics/step_series.h"

namespace epikv {

// An engine and the model it runs, as their series tell of them.
struct EngineFacts {
  std::string architecture, dtype, decode_kernel;
  std::string weights;  // digest of the checkpoint, or empty
  KvScale kv;
  int64_t kv_capacity_bytes = 0, tier_capacity_bytes = 0;
  int64_t weight_bytes = 0, scratch_bytes = 0;
  std::shared_ptr<const std::atomic<int64_t>> constraint_bytes;  // ConstraintCompiler::live_bytes
  int64_t max_running_requests = 256;
  int64_t threads = 1;
  absl::Duration load;  // how long loading took
};

// What balancers ask of an engine.
struct EngineLoad {
  StepStats last;                                                     // its newest step
  double prompt_tokens_per_second = 0, output_tokens_per_second = 0;  // see RecentRate
  double kv_reserved_ratio = 0;                                       // of late: see RecentMean
};

class EngineMetrics;

// The series of one model name, all with the label `model`. Engines that serve it one after the
// other share them: a swap sets no counter back. Thread-safe.
class ModelMetrics {
 public:
  // `budget`, which outlives it, must give what it has in any case (own_series); the rest comes as
  // policies are used.
  static absl::StatusOr<std::shared_ptr<ModelMetrics>> Create(std::string model,
                                                              SeriesBudget& budget);
  ~ModelMetrics();

  void OnRejected(absl::string_view reason) { rejected_.Count(reason); }  // ErrorInfo.reason

  // How long the step that runs has lasted; zero: none runs, or not for long.
  void SetStepAge(absl::Duration age) { step_age_.Set(absl::ToDoubleSeconds(age)); }

  // Of the engine that serves the name.
  EngineLoad Load() const;

  // Drops the series of all other arms ("experiment/arm"; of a request in several experiments,
  // those of which one is another), but for those of no arm and of "other".
  void KeepArms(const std::set<std::string, std::less<>>& arms);

  std::vector<prometheus::MetricFamily> Collect() const;

 private:
  friend class EngineMetrics;

  ModelMetrics(std::string model, SeriesBudget& budget);
  // Those of no policy and no arm, and of what has no series of its own.
  int64_t own_series() const;
  ArmSeries& Of(const Request& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool IsOther(const ArmSeries& arm) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Describe(const EngineFacts& facts) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::string model_;
  mutable absl::Mutex mu_;
  prometheus::Registry registry_;
  SeriesBudget& budget_;
  int64_t taken_ = 0;  // of the budget
  Declarations declare_, of_policy_;
  PolicyLabels labels_ ABSL_GUARDED_BY(mu_);  // of the policies that have rounds
  RequestSeries requests_ ABSL_GUARDED_BY(mu_);
  // By arm. What has no series of its own is of arm "other".
  std::map<std::string, std::unique_ptr<ArmSeries>, std::less<>> arms_ ABSL_GUARDED_BY(mu_);
  StepSeries steps_ ABSL_GUARDED_BY(mu_);
  RejectedSeries rejected_;
  prometheus::Family<prometheus::Gauge>& info_;
  prometheus::Gauge* described_ ABSL_GUARDED_BY(mu_) = nullptr;
  prometheus::Gauge &threads_, &load_, &last_step_, &step_age_;
  std::vector<const EngineMetrics*> engines_ ABSL_GUARDED_BY(mu_);  // that live, the newest last
};

// Watches one engine for the series of its model. Of the engine's thread.
class EngineMetrics final : public EngineObserver {
 public:
  EngineMetrics(std::shared_ptr<ModelMetrics> model, const EngineFacts& facts);
  ~EngineMetrics() override;

  void OnAdmitted(const Request& request, absl::Duration queued, int64_t cached) override;
  void OnStep(const StepStats& step) override;
  void OnFirstToken(const Request& request, absl::Duration since_arrival) override;
  void OnToken(const Request& request, absl::Duration since_last) override;
  void OnEvicted(const EvictedStats& evicted) override;
  void OnFinished(const Request& request, const Finished& finished) override;

 private:
  friend class ModelMetrics;

  const std::shared_ptr<ModelMetrics> model_;
  const EngineFacts facts_;
  // Guarded by the model's mutex.
  EngineFill fill_;
  RecentRate prompt_tokens_, output_tokens_;
  RecentMean reserved_ratio_;
  StepBefore before_;
  int64_t first_tokens_ = 0;  // in the step that runs
};

// Families of one name become one, as the exposition format wants it.
std::vector<prometheus::MetricFamily> MergedByName(std::vector<prometheus::MetricFamily> families);

}  // namespace epikv
