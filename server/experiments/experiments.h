#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "runtime/base/steady_cond_var.h"
#include "server/base/log.h"
#include "server/experiments/figures/shadow_observer.h"
#include "server/experiments/live_experiments.h"
#include "server/experiments/options.h"
#include "server/experiments/participation.h"
#include "server/experiments/store/recorder.h"
#include "server/experiments/store/store.h"
#include "server/metrics/metrics.h"

namespace epikv {

// All that experiments own: the store, who writes to it, what runs now, and the thread that keeps
// that up to date. Thread-safe.
class Experiments final : public Participation, public ShadowObserver {
 public:
  // The error names the setting that is wrong. A store that is away is none: what runs is known
  // once it is back.
  static absl::StatusOr<std::unique_ptr<Experiments>> Open(const ExperimentsOptions& options,
                                                           Metrics& metrics, const Log& log);
  ~Experiments() override;

  absl::StatusOr<Assignment> Assign(const Subject& subject) override;
  void OnExcluded(const std::vector<std::string>& experiments) override;
  void OnBegan(v1::RequestBegan began) override;
  void OnEnded(v1::RequestEnded ended) override;

  void OnShadow(const v1::RequestBegan& began, ShadowFate fate, const Divergence& found) override;
  void OnPair(const v1::RequestBegan& began, ShadowFate fate, const PairFound& found) override;
  void OnShadowWaiting(int64_t requests) override;
  void OnShadowTime(absl::Duration spent, bool interrupted) override;

  // Blocks, as the store does.
  Store& store() { return *store_; }
  absl::Duration lost_after() const { return options_.lost_after; }
  // Whether requests are replayed here, and so whether there can be pairs.
  bool replays() const { return options_.shadow.share_of_requests > 0; }
  // Whether no experiment declares this metric, of what is known while the store cannot be asked. A
  // store that can be asked knows better.
  bool SurelyUndeclared(const std::string& metric) const;
  // What runs, as the store has it now; for who has just changed it. Blocks.
  void Refresh();
  void Record(v1::OutcomeSeen outcome, Recorder::Done done);
  // All definitions, as last heard of.
  std::shared_ptr<const std::vector<v1::Experiment>> known() const;

 private:
  Experiments(std::unique_ptr<Store> store, std::unique_ptr<Spool> spool,
              const ExperimentsOptions& options, Metrics& metrics, const Log& log);
  void Keep();
  void LookAt(const absl::StatusOr<Definitions>& definitions);
  void KeepSeries(absl::Time now);
  void StopEnded(absl::Time now);
  void Judge(absl::Time now);
  // How long reading took.
  absl::Duration JudgeOne(const v1::Experiment& experiment, absl::Time now);
  // Unless it is over, or `still` does not hold of it any more. Whether it was stopped here; what
  // runs is to be refreshed then.
  bool StopNow(const std::string& name, const std::string& reason,
               absl::FunctionRef<bool(const v1::Experiment&)> still);
  void Forget(absl::Time now);
  // Says once that the store is away, and once that it is back.
  void Tell(const absl::Status& store);

  const std::unique_ptr<Store> store_;
  const ExperimentsOptions options_;
  Metrics& metrics_;
  ExperimentSeries& series_;
  const Log& log_;
  absl::Mutex series_mu_;  // held while what has series is replaced by what is known
  LiveExperiments live_;
  Recorder recorder_;  // ends before what it writes to
  mutable absl::Mutex mu_;
  int64_t revision_ ABSL_GUARDED_BY(mu_) = -1;
  std::shared_ptr<const std::vector<v1::Experiment>> known_ ABSL_GUARDED_BY(mu_) =
      std::make_shared<const std::vector<v1::Experiment>>();
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  SteadyCondVar stop_;
  // Of the keeper; by SteadyTime.
  absl::Duration forget_next_ = -absl::InfiniteDuration();
  absl::Duration judge_next_ = -absl::InfiniteDuration();
  bool away_ = false;
  std::thread keeper_;
};

}  // namespace epikv
