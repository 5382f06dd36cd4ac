#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "epikv/v1/experiment.pb.h"
#include "epikv/v1/experiment_record.pb.h"

namespace epikv {

// What became of a record.
enum class Recorded {
  kWritten,
  kDuplicate,         // it was there; nothing changed
  kConflict,          // an outcome of that key has another value, which stays
  kUnknownRequest,    // of an outcome or an end: no such request; not kept
  kWaiting,           // as kUnknownRequest, but kept until its request comes
  kLate,              // received after outcome_window
  kUndeclaredMetric,  // by none of the request's experiments
  kInvalid,           // no store can hold it: no fact, no id, a NUL in a text, a value not finite
  kSpooled,           // Recorder only: in the spool, and so kept
};

// Where records come from, and so what is known of an outcome's request.
enum class Source {
  // Told just now: an outcome is of the newest request of its (tenant, request_id), whatever the
  // clocks say, and without one it is refused.
  kNow,
  // Acknowledged before: an outcome is of the newest that began by `received`, of the oldest where
  // clocks leave none, and waits where there is none at all: another replica may still have it in
  // its spool.
  kSpool,
};

// An outcome that counts, in one of its request's experiments: one that declares its metric, and in
// which its arm was not forced.
struct CountedOutcome {
  std::string experiment, arm, metric;
  double value = 0;
};

struct WriteResult {
  std::vector<Recorded> records;         // one each, in order
  std::vector<CountedOutcome> outcomes;  // that count since, those that had waited among them
};

struct Definitions {
  // Grows with each change.
  int64_t revision = 0;
  std::vector<v1::Experiment> experiments;  // by name
};

struct OutcomeRow {
  std::string metric;
  std::string key;
  double value = 0;
  absl::Time happened;
  absl::Time received;
};

struct EndRow {
  absl::Time time;
  std::string code;  // of gRPC: "OK"
  std::string reason;
  std::string finish_reason;
  double request_seconds = 0;
  int64_t output_tokens = 0;
  std::optional<int64_t> kv_peak_tokens;
  std::optional<int64_t> kv_evicted_tokens;
  std::optional<double> queue_seconds;
  std::optional<double> ttft_seconds;
  std::optional<double> time_per_output_token_seconds;
};

// What a replay has shown: sums over output tokens, of which there are some.
struct ShadowRow {
  int64_t tokens = 0;
  int64_t agreed_tokens = 0;
  double kl_nats = 0;
};

// What became of a pair.
struct PairRow {
  // Of the request's own arm, and of pair_arm. Absent: the pair was lost.
  std::optional<ShadowRow> shown, hidden;
};

// A request's part in one experiment. Times are in whole microseconds.
struct RequestRow {
  std::string id;
  uint64_t unit = 0;
  bool unit_is_request = false;
  std::string model;
  absl::Time began;
  int64_t prompt_tokens = 0;
  int64_t max_output_tokens = 0;
  std::optional<double> covariate;
  uint32_t bucket_version = 0;
  std::string arm;
  bool forced = false;
  bool exposed = false;
  std::string subgroup;  // RequestBegan.Part.subgroup
  std::string pair_arm;  // RequestBegan.Part.pair_arm
  std::optional<EndRow> end;
  bool lost = false;  // no end came, and none will: said by who reads it, not by the store
  std::optional<ShadowRow> shadow;
  std::optional<PairRow> pair;  // once it is settled
  // Of the experiment's metrics, within its outcome_window; by metric and key.
  std::vector<OutcomeRow> outcomes;
};

// Requests that began in [from, until).
struct Reading {
  std::string experiment;
  absl::Time from = absl::InfinitePast();
  absl::Time until = absl::InfiniteFuture();
};

// How long after its request an outcome is taken: one day where the definition does not say.
absl::Duration OutcomeWindow(const v1::Experiment& experiment);

// Keeps experiments' definitions, who took part in them, and what came of it. What was written
// survives kill -9 and power loss, once the call has returned. Thread-safe; replicas and processes
// may share one. Calls block, for bounded times (StoreOptions), and may open connections.
//
// Errors: kUnavailable is an outage (no connection, no space, locked, read-only, out of time): the
// call may have had its effect all the same, and may be made again. kInvalidArgument: a value can
// never be stored. kFailedPrecondition: the store is not ours, or newer than this program. Others:
// rights, passwords, damage. No message holds a password.
class Store {
 public:
  virtual ~Store() = default;

  // All of them or, with an error, none. What is there changes nothing, so that a Write whose fate
  // is unknown may be repeated. An outcome may be of a request that comes before it in `records`.
  virtual absl::StatusOr<WriteResult> Write(absl::Span<const v1::ExperimentRecord> records,
                                            Source source) = 0;

  virtual absl::StatusOr<Definitions> Experiments() = 0;
  // Definitions::revision, for less.
  virtual absl::StatusOr<int64_t> Revision() = 0;

  // These return the definition as stored, with the etag that the store has given it.
  // kAlreadyExists.
  virtual absl::StatusOr<v1::Experiment> Create(const v1::Experiment& experiment) = 0;
  // kNotFound; kAborted where its etag is not `etag`.
  virtual absl::StatusOr<v1::Experiment> Replace(const v1::Experiment& experiment,
                                                 const std::string& etag) = 0;
  // The new definition of `name`, made from all that there are while nobody else can change any:
  // what starts an experiment sees the buckets of all others. kNotFound, or the edit's own error,
  // which leaves everything as it was. The edit runs under the store's write lock, on the calling
  // thread: it must be quick and must not call the store.
  using Edit =
      absl::FunctionRef<absl::StatusOr<v1::Experiment>(const std::vector<v1::Experiment>& all)>;
  virtual absl::StatusOr<v1::Experiment> Change(const std::string& name, Edit edit) = 0;

  // By `began`. Rows that others write meanwhile may be missing; none comes twice. Holds some
  // thousand rows at a time. Ends with the callback's error, kNotFound for an unknown experiment.
  using OnRequest = absl::FunctionRef<absl::Status(const RequestRow& row)>;
  virtual absl::Status ReadRequests(const Reading& reading, OnRequest on_request) = 0;

  // Deletes what experiments have found whose outcome_window, counted from their stop, was over at
  // `before`: all that an experiment has found, so that no report is of a part of it, and nothing
  // of those that run. Definitions stay. Also outcomes that have waited for their requests since
  // before then. Some thousand rows a call; returns how many, so 0 once there are none left.
  virtual absl::StatusOr<int64_t> Forget(absl::Time before) = 0;
};

}  // namespace epikv
