#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "epikv/v1/experiment_record.pb.h"
#include "runtime/base/steady_cond_var.h"
#include "runtime/request/request.h"
#include "server/experiments/figures/divergence.h"
#include "server/experiments/figures/shadow_observer.h"
#include "server/experiments/options.h"
#include "server/models/models.h"

namespace epikv {

// The live quality signal that needs no labels. Of requests that take part in experiments and end
// well a sample is replayed while no engine has anything else to do: the tokens that were generated
// are forced, once under the full cache, in chunks, and once as the request ran, evicting what it
// did, and the two next-token distributions compared at each of them (Divergence).
//
// What is sampled is kept in memory alone: beside those that still run so many requests and tokens
// at most, the newest taking the place of the oldest, and forgotten after its replay. A replay
// gives way within one step (EngineThread::SubmitIdle), is tried again a few times, and of the
// process's wall time replays take a bounded share. Thread-safe.
class Shadow {
 public:
  // A request that is sampled.
  struct Sample {
    v1::RequestBegan began;  // with the parts that are not forced
    std::weak_ptr<const ServedModel> model;
    Request request;  // as it ran, with what came of it as `forced`
    int tries = 0;
  };
  // Hears what becomes of it. Of the engine's thread.
  class Tap {
   public:
    Tap(Shadow& shadow, Sample sample) : shadow_(shadow), sample_(std::move(sample)) {}
    void OnDelta(const Delta& delta);
    void OnFinished(const Finished& finished);

   private:
    Shadow& shadow_;
    Sample sample_;
  };

  // models and observer outlive it.
  Shadow(const ShadowOptions& options, const Models& models, ShadowObserver& observer);
  // Within one step. Precondition: no Tap hears anything any more.
  ~Shadow();

  // Of a request that is about to be queued; null: it is not sampled (of several completions none
  // is, nor is one whose arms were all forced).
  std::shared_ptr<Tap> Follow(const v1::RequestBegan& began, const ModelPtr& model,
                              const Request& request);

 private:
  using Rows = std::vector<std::vector<TokenLogprob>>;  // by output token
  class RowSink;

  static int64_t TokensOf(const Sample& sample);
  void Put(Sample sample);
  Sample PopOldest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::optional<Sample> Take();
  bool Busy() const;
  void Run();
  absl::StatusOr<Divergence> Replay(const Request& request, const ModelPtr& model);
  absl::StatusOr<Rows> RowsOf(Request request, const ModelPtr& model);
  void Settle(Sample sample, const absl::StatusOr<Divergence>& found);

  const ShadowOptions options_;
  const Models& models_;
  ShadowObserver& observer_;
  absl::Mutex mu_;
  std::deque<Sample> samples_ ABSL_GUARDED_BY(mu_);  // the oldest first
  int64_t tokens_ ABSL_GUARDED_BY(mu_) = 0;          // theirs
  absl::Duration next_ ABSL_GUARDED_BY(mu_);         // by SteadyTime: no replay before
  ModelPtr replaying_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  SteadyCondVar stop_;
  std::thread thread_;
};

}  // namespace epikv
