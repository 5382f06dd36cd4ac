#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "epikv/v1/experiment.pb.h"
#include "epikv/v1/experiment_record.pb.h"
#include "epikv/v1/generation.pb.h"
#include "epikv/v1/steering.pb.h"
#include "runtime/admission/admission.h"
#include "server/experiments/seen_units.h"

namespace epikv {

// A request, before it is admitted.
struct Subject {
  const v1::GenerateRequest& request;
  absl::string_view request_id;  // the client's, or the one that was made
  absl::string_view model;
  int64_t prompt_tokens = 0, max_output_tokens = 0;
  absl::Time began = {};
};

// What the other arm of an experiment would have made of a request, where both are to answer.
struct Pairing {
  int part = 0;     // of the experiment, in Assignment::parts
  std::string arm;  // the other one
  // In place of Assignment's.
  v1::KvOptions kv;
  std::optional<v1::Steering> steering;
};

// What experiments make of a request.
struct Assignment {
  std::vector<v1::RequestBegan::Part> parts;  // none: it takes part in no experiment
  // As its arms have them, where there are parts.
  v1::KvOptions kv;
  std::optional<v1::Steering> steering;  // nullopt: the arms leave the request's own
  bool steers = false;  // some arm of its experiments sets steering, of this request or of others
  std::string arm;      // "experiment/arm", joined by ","; or kNoArm
  // nullopt: nobody else answers. One of several experiments at most has a pair of it.
  std::optional<Pairing> pairing;
  // Experiments that its unit belongs to and that it is not eligible for, or does not want.
  std::vector<std::string> excluded;
};

inline constexpr absl::string_view kNoArm = "none";

// What is wrong with what a request says of itself, whatever runs.
std::vector<FieldViolation> CheckContext(const v1::GenerateRequest& request);

// Who keeps its arm, but for switchback experiments: the unit that was given, else the request.
absl::string_view UnitOf(const Subject& subject);

// What a store is told of a request that takes part; id and tenant are the caller's to set.
v1::RequestBegan BeganOf(const Subject& subject, const Assignment& assignment);

// The experiments that run, as last heard of, and what they make of a request. Thread-safe.
class LiveExperiments {
 public:
  // Of any order. Arms of different layers set different options (see StartExperiment); where they
  // do not, the first name goes first.
  void Set(std::vector<v1::Experiment> running);

  std::shared_ptr<const std::vector<v1::Experiment>> running() const;

  // The error, INVALID_ARGUMENT, is of a force_arm that does not run. Of a unit that has come
  // lately there is no pairing: the same call again has none.
  absl::StatusOr<Assignment> Assign(const Subject& subject) const;

 private:
  mutable absl::Mutex mu_;
  // By name. Replaced whole, so that nobody waits for a reader.
  std::shared_ptr<const std::vector<v1::Experiment>> running_ ABSL_GUARDED_BY(mu_) =
      std::make_shared<const std::vector<v1::Experiment>>();
  mutable SeenUnits seen_;  // by PairHash: units that have pairs
};

}  // namespace epikv
