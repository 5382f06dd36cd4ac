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
// Of pairs (Experiment.pairs) both answers are replayed, once the hidden one has been generated.
// Such a request ended well, too, and may be sampled besides.
//
// What is sampled is kept in memory alone: beside those that still run so many requests and tokens
// at most, the newest taking the place of the oldest, and forgotten after its replay. A replay
// gives way within one step (EngineThread::SubmitIdle), is tried again a few times, and of the
// process's wall time replays take a bounded share. Thread-safe.
class Shadow {
 public:
  // What one arm said to a prompt.
  struct Answer {
    Request request;  // as it ran or is to run, with what came of it as `forced`
    std::optional<Divergence> found;
  };
  // A request that is sampled, or one that has a pair.
  struct Sample {
    v1::RequestBegan began;  // with the parts that are not forced
    std::weak_ptr<const ServedModel> model;
    Answer shown;
    std::optional<Answer> hidden;  // of a pair
    int tries = 0;                 // of what is to be done next
  };
  // Hears what becomes of it. Of the engine's thread.
  class Tap {
   public:
    Tap(Shadow& shadow, std::vector<Sample> samples)
        : shadow_(shadow), samples_(std::move(samples)) {}
    void OnDelta(const Delta& delta);
    void OnFinished(const Finished& finished);

   private:
    Shadow& shadow_;
    std::vector<Sample> samples_;
    std::vector<int32_t> outputs_;
  };

  // models and observer outlive it.
  Shadow(const ShadowOptions& options, const Models& models, ShadowObserver& observer);
  // Within one step. Precondition: no Tap hears anything any more.
  ~Shadow();

  // Of a request that is about to be queued; null: it is not sampled (of several completions none
  // is, nor is one whose arms were all forced) and has no pair. hidden: of a pair, what the other
  // arm makes of the request.
  std::shared_ptr<Tap> Follow(const v1::RequestBegan& began, const ModelPtr& model,
                              const Request& request, const std::optional<Request>& hidden);

 private:
  using Rows = std::vector<std::vector<TokenLogprob>>;  // by output token
  struct Output {
    std::vector<int32_t> tokens;
    Rows rows;  // of the likeliest, where they were asked for
  };
  class OutputSink;

  static int64_t TokensOf(const Answer& answer);
  static int64_t TokensOf(const Sample& sample);
  void Put(Sample sample);
  Sample PopOldest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::optional<Sample> Take();
  bool Busy() const;
  void Run();
  // All that is left to be done of a sample, as far as it goes.
  absl::Status Advance(Sample& sample, const ModelPtr& model);
  absl::StatusOr<Divergence> Replay(const Request& request, const ModelPtr& model);
  absl::StatusOr<Rows> RowsOf(Request request, const ModelPtr& model);
  // top: likeliest tokens told of at each place.
  absl::StatusOr<Output> OutputOf(Request request, int64_t top, const ModelPtr& model);
  void Settle(Sample sample, const absl::Status& advanced);
  void Tell(const Sample& sample, ShadowFate fate);

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
