#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "epikv/v1/experiment_record.pb.h"
#include "runtime/base/steady_cond_var.h"
#include "server/experiments/store/spool.h"
#include "server/experiments/store/store.h"

namespace epikv {

// Told what a Recorder does: on its thread, but where a method says otherwise. Must not block.
class RecorderObserver {
 public:
  virtual ~RecorderObserver() = default;
  // Records that a store has taken, without or by way of the spool, new or known.
  virtual void OnWritten(int64_t /*records*/) {}
  virtual void OnReplayed(int64_t /*records*/) {}
  virtual void OnSpooled(int64_t /*records*/) {}
  // Outcomes that count for no request, and ends of unknown ones: kConflict, kUnknownRequest,
  // kWaiting, kLate, kUndeclaredMetric, kInvalid.
  virtual void OnOrphaned(Recorded /*why*/) {}
  // An outcome that counts since now.
  virtual void OnOutcome(const CountedOutcome& /*outcome*/) {}
  // Facts that neither queue, store nor spool has taken. Any thread.
  virtual void OnDropped(int64_t /*records*/) {}
  // Outcomes that were not acknowledged, for the same reasons. Any thread.
  virtual void OnRefused(int64_t /*outcomes*/) {}
  // The store is away (or the spool cannot be read), since about now; then how much longer, after
  // each try and at the end.
  virtual void OnOutage(const absl::Status& /*why*/) {}
  virtual void OnOutageTime(absl::Duration /*more*/) {}
  virtual void OnSpool(int64_t /*bytes*/, SpoolDamage /*since_opened*/) {}
};

struct RecorderOptions {
  // Of what waits for the thread; a record more than its own bytes.
  size_t max_queued_bytes = size_t{32} << 20;
  // Records that are written at once.
  size_t max_batch = 1000;
  // Between tries while the store is away: from the first, doubling, to the last; less up to half.
  absl::Duration first_backoff = absl::Milliseconds(50);
  absl::Duration last_backoff = absl::Seconds(1);
  // How long, at the end, what is queued is offered to the store before the spool takes the rest.
  absl::Duration flush = absl::Seconds(5);
  // Of the queue and of the spool, what outcomes may take, all and those of one tenant: whether
  // their requests exist is not known before the store is asked. The rest is for facts about
  // requests.
  double outcomes_share = .5, tenants_share = .25;
};

// Brings records to the store, on a thread of its own: all that is queued in one transaction. While
// the store is away they go to the spool, and from there, in their order and before newer ones, to
// the store. Thread-safe; nobody waits for it.
class Recorder {
 public:
  // Told once, on the recorder's thread, when the record is in the store (whatever Recorded it is)
  // or in the spool (kSpooled); or that it is in neither, and will not be. Must not block.
  using Done = std::function<void(const absl::StatusOr<Recorded>&)>;

  // The store and the observer outlive it.
  Recorder(Store& store, std::unique_ptr<Spool> spool, RecorderObserver& observer,
           const RecorderOptions& options = {});
  // Settles what was recorded. Takes the flush time and one call of the store at most.
  ~Recorder();

  // Without `done`, for facts about requests: what there is no room for is dropped and counted.
  // With it, for outcomes; where the queue has no room it is told at once, on this thread
  // (kResourceExhausted). The times `began.time` and `outcome.received` are the present: where the
  // clock went back by less than an hour, they become a microsecond more than the one before, so
  // that later records have later times.
  void Record(v1::ExperimentRecord record, Done done = nullptr);

  // Whether the store could not be written to when it was tried last.
  bool store_is_away() const { return away_; }

 private:
  struct Queued {
    v1::ExperimentRecord record;
    Done done;
    size_t bytes = 0;
  };
  struct Batch {
    std::vector<v1::ExperimentRecord> records;
    std::vector<Done> dones;  // one each
  };
  void Run();
  std::optional<Batch> Take();
  void Stamp(v1::ExperimentRecord& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool HasRoom(const v1::ExperimentRecord& record, size_t bytes) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Duration LeftUntilTry() const;
  bool MayTry() const;
  void Settle(Batch batch);
  void Replay();
  void Keep(Batch batch);
  bool Append(const Batch& batch);
  // Refuses the outcomes that have no room in the spool's part for them.
  void RefuseOutcomes(Batch& batch);
  using OnResult = absl::FunctionRef<void(size_t record, const absl::StatusOr<Recorded>& recorded)>;
  size_t Write(absl::Span<const v1::ExperimentRecord> records, Source source, OnResult on_result);
  void Count(const absl::StatusOr<Recorded>& recorded);
  void StoreIsAway(const absl::Status& why);
  void StoreIsThere();
  void TellSpool();

  Store& store_;
  RecorderObserver& observer_;
  const RecorderOptions options_;

  mutable absl::Mutex mu_;
  SteadyCondVar called_;
  std::deque<Queued> queue_ ABSL_GUARDED_BY(mu_);
  size_t queued_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  size_t queued_outcome_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::string, size_t> queued_of_tenant_ ABSL_GUARDED_BY(mu_);  // of outcomes
  int64_t newest_us_ ABSL_GUARDED_BY(mu_) = 0;                           // of the times of records
  // Since SteadyTime's moment: when to stop offering to the store. None: it goes on.
  std::optional<absl::Duration> flush_until_ ABSL_GUARDED_BY(mu_);

  // Of the thread.
  const std::unique_ptr<Spool> spool_;
  absl::Status spool_error_;  // of the last Append
  // Of outcomes in the spool, since it was empty. What lay there at the start counts as outcomes,
  // of nobody: only reading all of it would tell.
  std::map<std::string, int64_t> outcome_bytes_;  // by tenant
  int64_t all_outcome_bytes_;
  size_t replayed_batch_;           // records
  std::atomic<bool> away_ = false;  // any thread reads it
  absl::Duration backoff_;
  // By SteadyTime.
  absl::Duration next_try_;
  absl::Duration outage_told_;  // until when
  std::thread thread_;
};

}  // namespace epikv
