#include "server/experiments/store/recorder.h"

#include <google/protobuf/util/time_util.h>

#include <algorithm>
#include <utility>

#include "absl/random/random.h"
#include "runtime/base/steady_time.h"

namespace epikv {
namespace {

using google::protobuf::util::TimeUtil;

// A clock that went back further was wrong before.
constexpr absl::Duration kMaxHeld = absl::Hours(1);
// Of batches that are replayed while one comes: the spool ends though as much comes as there can.
constexpr size_t kReplayedBatches = 4;
// What a record takes beside its own bytes.
constexpr size_t kEntryBytes = 200;

}  // namespace

Recorder::Recorder(Store& store, std::unique_ptr<Spool> spool, RecorderObserver& observer,
                   const RecorderOptions& options)
    : store_(store),
      observer_(observer),
      options_(options),
      spool_(std::move(spool)),
      all_outcome_bytes_(spool_->bytes()),
      replayed_batch_(options.max_batch),
      next_try_(SteadyTime()) {
  TellSpool();
  thread_ = std::thread([this] { Run(); });
}

Recorder::~Recorder() {
  {
    absl::MutexLock lock(&mu_);
    flush_until_ = SteadyTime() + options_.flush;
  }
  called_.Signal();
  thread_.join();
}

void Recorder::Record(v1::ExperimentRecord record, Done done) {
  const size_t bytes = record.ByteSizeLong() + kEntryBytes;
  bool has_room = false;
  {
    absl::MutexLock lock(&mu_);
    has_room = HasRoom(record, bytes);
    if (has_room) {
      Stamp(record);
      queued_bytes_ += bytes;
      if (record.has_outcome()) {
        queued_outcome_bytes_ += bytes;
        queued_of_tenant_[record.outcome().tenant()] += bytes;
      }
      queue_.push_back({.record = std::move(record), .done = std::move(done), .bytes = bytes});
    }
  }
  if (has_room) return called_.Signal();
  if (done == nullptr) {  // NOLINT(bugprone-use-after-move): moved only where there was room
    observer_.OnDropped(1);
    return;
  }
  observer_.OnRefused(1);
  done(absl::ResourceExhaustedError("too many outcomes wait to be written"));
}

bool Recorder::HasRoom(const v1::ExperimentRecord& record, size_t bytes) const {
  if (queued_bytes_ + bytes > options_.max_queued_bytes) return false;
  if (!record.has_outcome()) return true;
  const auto of_tenant = queued_of_tenant_.find(record.outcome().tenant());
  const size_t own = of_tenant == queued_of_tenant_.end() ? 0 : of_tenant->second;
  const auto room = static_cast<double>(options_.max_queued_bytes);
  return static_cast<double>(own + bytes) <= options_.tenants_share * room &&
         static_cast<double>(queued_outcome_bytes_ + bytes) <= options_.outcomes_share * room;
}

void Recorder::Stamp(v1::ExperimentRecord& record) {
  google::protobuf::Timestamp* time = nullptr;
  if (record.has_began()) time = record.mutable_began()->mutable_time();
  if (record.has_outcome()) time = record.mutable_outcome()->mutable_received();
  if (time == nullptr) return;
  const int64_t now_us = TimeUtil::TimestampToMicroseconds(*time);
  const bool went_back = now_us <= newest_us_ && absl::Microseconds(newest_us_ - now_us) < kMaxHeld;
  newest_us_ = went_back ? newest_us_ + 1 : now_us;
  if (went_back) *time = TimeUtil::MicrosecondsToTimestamp(newest_us_);
}

void Recorder::Run() {
  while (std::optional<Batch> batch = Take()) {
    if (!batch->records.empty()) Settle(*std::move(batch));
    Replay();
  }
}

// The oldest that are queued; empty: it is time to try the store again; none: the end.
std::optional<Recorder::Batch> Recorder::Take() {
  absl::MutexLock lock(&mu_);
  auto called = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return !queue_.empty() || flush_until_.has_value();
  };
  called_.Wait(mu_, LeftUntilTry(), called);
  if (queue_.empty() && flush_until_.has_value()) return std::nullopt;
  Batch batch;
  while (!queue_.empty() && batch.records.size() < options_.max_batch) {
    Queued& oldest = queue_.front();
    queued_bytes_ -= oldest.bytes;
    if (oldest.record.has_outcome()) {
      queued_outcome_bytes_ -= oldest.bytes;
      const auto of_tenant = queued_of_tenant_.find(oldest.record.outcome().tenant());
      of_tenant->second -= oldest.bytes;
      if (of_tenant->second == 0) queued_of_tenant_.erase(of_tenant);
    }
    batch.records.push_back(std::move(oldest.record));
    batch.dones.push_back(std::move(oldest.done));
    queue_.pop_front();
  }
  return batch;
}

absl::Duration Recorder::LeftUntilTry() const {
  if (spool_->empty() && !away_) return absl::InfiniteDuration();
  return std::max(absl::ZeroDuration(), next_try_ - SteadyTime());
}

bool Recorder::MayTry() const {
  const absl::Duration now = SteadyTime();
  absl::MutexLock lock(&mu_);
  return now >= next_try_ && now < flush_until_.value_or(absl::InfiniteDuration());
}

void Recorder::Settle(Batch batch) {
  if (spool_->empty() && MayTry()) {
    const size_t written = Write(batch.records, Source::kNow, [&](size_t i, const auto& recorded) {
      Count(recorded);
      if (batch.dones[i] != nullptr) batch.dones[i](recorded);
    });
    if (written > 0) observer_.OnWritten(static_cast<int64_t>(written));
    const auto settled = static_cast<std::ptrdiff_t>(written);
    batch.records.erase(batch.records.begin(), batch.records.begin() + settled);
    batch.dones.erase(batch.dones.begin(), batch.dones.begin() + settled);
  }
  if (!batch.records.empty()) Keep(std::move(batch));
}

// How many of the records, from the first on, are settled: all, but where the store is away. One
// that no store can take is settled with its error, and found by halves.
size_t Recorder::Write(absl::Span<const v1::ExperimentRecord> records, Source source,
                       OnResult on_result) {
  size_t settled = 0, next = records.size();
  while (settled < records.size()) {
    const auto part = records.subspan(settled, next);
    const absl::StatusOr<WriteResult> results = store_.Write(part, source);
    if (!results.ok() && !absl::IsInvalidArgument(results.status())) {
      StoreIsAway(results.status());
      return settled;
    }
    StoreIsThere();
    if (!results.ok() && part.size() > 1) {
      next = part.size() / 2;
      continue;
    }
    for (size_t i = 0; i < part.size(); ++i) {
      if (results.ok()) on_result(settled + i, results->records[i]);
      if (!results.ok()) on_result(settled + i, results.status());
    }
    if (results.ok()) {
      for (const CountedOutcome& outcome : results->outcomes) observer_.OnOutcome(outcome);
    }
    settled += part.size();
    next = 2 * part.size();
  }
  return settled;
}

void Recorder::Count(const absl::StatusOr<Recorded>& recorded) {
  const Recorded what = recorded.value_or(Recorded::kInvalid);
  if (what != Recorded::kWritten && what != Recorded::kDuplicate) observer_.OnOrphaned(what);
}

// Some of the spool; nothing at the end, since it is kept. Where it is empty, and the store was
// away, whether it still is.
void Recorder::Replay() {
  if ((spool_->empty() && !away_) || !MayTry()) return;
  {
    absl::MutexLock lock(&mu_);
    if (flush_until_.has_value()) return;
  }
  if (spool_->empty()) {
    const absl::Status store = store_.Revision().status();
    return store.ok() ? StoreIsThere() : StoreIsAway(store);
  }
  const absl::StatusOr<Spool::Batch> batch = spool_->Read(replayed_batch_);
  if (!batch.ok()) return StoreIsAway(batch.status());
  std::vector<absl::StatusOr<Recorded>> results;
  const size_t written = Write(batch->records, Source::kSpool,
                               [&](size_t, const auto& recorded) { results.push_back(recorded); });
  // If not all are there, all come again: those that are do not change. But fewer at once: a store
  // that is slow must not be asked for ever for more than it does in its time.
  const bool all = written == batch->records.size();
  replayed_batch_ = all ? std::min(2 * replayed_batch_, kReplayedBatches * options_.max_batch)
                        : std::max(replayed_batch_ / 2, size_t{1});
  if (!all) return;
  spool_->Remove(*batch);
  for (const auto& recorded : results) Count(recorded);
  observer_.OnReplayed(static_cast<int64_t>(written));
  TellSpool();
}

// Outcomes first, where there is no room for all: somebody waits for them.
void Recorder::Keep(Batch batch) {
  RefuseOutcomes(batch);
  if (batch.records.empty() || Append(batch)) return;
  Batch outcomes;
  for (size_t i = 0; i < batch.records.size(); ++i) {
    if (batch.dones[i] == nullptr) continue;
    outcomes.records.push_back(std::move(batch.records[i]));
    outcomes.dones.push_back(std::move(batch.dones[i]));
  }
  const size_t dropped = batch.records.size() - outcomes.records.size();
  if (dropped > 0) observer_.OnDropped(static_cast<int64_t>(dropped));
  if (outcomes.records.empty() || (dropped > 0 && Append(outcomes))) return;
  observer_.OnRefused(static_cast<int64_t>(outcomes.records.size()));
  for (const Done& done : outcomes.dones) done(spool_error_);
}

void Recorder::RefuseOutcomes(Batch& batch) {
  if (spool_->empty()) {
    outcome_bytes_.clear();
    all_outcome_bytes_ = 0;
  }
  const auto room = static_cast<double>(spool_->max_bytes());
  Batch kept;
  for (size_t i = 0; i < batch.records.size(); ++i) {
    if (batch.dones[i] != nullptr) {
      const auto bytes = static_cast<int64_t>(batch.records[i].ByteSizeLong());
      const std::string& tenant = batch.records[i].outcome().tenant();
      const auto known = outcome_bytes_.find(tenant);
      const int64_t of_tenant = known == outcome_bytes_.end() ? 0 : known->second;
      if (static_cast<double>(of_tenant + bytes) > options_.tenants_share * room ||
          static_cast<double>(all_outcome_bytes_ + bytes) > options_.outcomes_share * room) {
        observer_.OnRefused(1);
        batch.dones[i](absl::ResourceExhaustedError("too many outcomes wait for the store"));
        continue;
      }
      outcome_bytes_[tenant] = of_tenant + bytes;
      all_outcome_bytes_ += bytes;
    }
    kept.records.push_back(std::move(batch.records[i]));
    kept.dones.push_back(std::move(batch.dones[i]));
  }
  batch = std::move(kept);
}

bool Recorder::Append(const Batch& batch) {
  spool_error_ = spool_->Append(batch.records);
  TellSpool();
  if (!spool_error_.ok()) return false;
  observer_.OnSpooled(static_cast<int64_t>(batch.records.size()));
  for (const Done& done : batch.dones) {
    if (done != nullptr) done(Recorded::kSpooled);
  }
  return true;
}

void Recorder::StoreIsAway(const absl::Status& why) {
  const absl::Duration now = SteadyTime();
  if (!away_.exchange(true)) {
    outage_told_ = now;
    backoff_ = options_.first_backoff;
    observer_.OnOutage(why);
  } else {
    backoff_ = std::min(2 * backoff_, options_.last_backoff);
    observer_.OnOutageTime(now - std::exchange(outage_told_, now));
  }
  absl::BitGen random;
  next_try_ = now + backoff_ * absl::Uniform(random, 0.5, 1.0);
}

void Recorder::StoreIsThere() {
  const absl::Duration now = SteadyTime();
  if (away_.exchange(false)) observer_.OnOutageTime(now - outage_told_);
  next_try_ = now;
}

void Recorder::TellSpool() { observer_.OnSpool(spool_->bytes(), spool_->damage()); }

}  // namespace epikv
