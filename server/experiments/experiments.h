#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/experiments/live_experiments.h"
#include "server/experiments/options.h"
#include "server/experiments/participation.h"
#include "server/experiments/recorder.h"
#include "server/experiments/store.h"
#include "server/log.h"
#include "server/metrics.h"

namespace epikv {

// All that experiments own: the store, who writes to it, what runs now, and the thread that keeps
// that up to date. Thread-safe.
class Experiments final : public Participation {
 public:
  // The error names the setting that is wrong. A store that is away is none: what runs is known once
  // it is back.
  static absl::StatusOr<std::unique_ptr<Experiments>> Open(const ExperimentsOptions& options,
                                                           Metrics& metrics, const Log& log);
  ~Experiments() override;

  absl::StatusOr<Assignment> Assign(const Subject& subject) override;
  void OnBegan(v1::RequestBegan began) override;
  void OnEnded(v1::RequestEnded ended) override;

  // Blocks, as the store does.
  Store& store() { return *store_; }
  // What runs, as the store has it now; for who has just changed it. Blocks.
  void Refresh();
  // done: with what became of it, on another thread.
  void Record(v1::OutcomeSeen outcome, std::function<void(absl::StatusOr<Recorded>)> done);
  // What was declared by those that are known.
  std::shared_ptr<const std::vector<v1::Experiment>> known() const;

  // No request begins or ends any more: what waits is written, until `deadline`; then it is spooled.
  void Close(absl::Time deadline);

 private:
  Experiments(std::unique_ptr<Store> store, absl::Duration retention, Metrics& metrics,
              const Log& log);
  void Keep();
  absl::Status Look();
  void StopEnded(const std::vector<v1::Experiment>& all);

  const std::unique_ptr<Store> store_;
  const absl::Duration retention_;
  Metrics& metrics_;
  const Log& log_;
  LiveExperiments live_;
  std::unique_ptr<Recorder> recorder_;
  mutable absl::Mutex mu_;
  int64_t revision_ ABSL_GUARDED_BY(mu_) = -1;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread keeper_;
};

}  // namespace epikv
