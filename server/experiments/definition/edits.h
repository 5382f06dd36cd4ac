#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "epikv/v1/experiment.pb.h"

// What may become of an experiment, among all there are. Errors have a reason
// (runtime/base/reason.h): ETAG (kAborted), EXPERIMENT_STATE, LAYER_FULL, ARMS_CONFLICT, REBUCKET,
// DECIDED (kFailedPrecondition).

namespace epikv {

// kNotFound.
absl::StatusOr<v1::Experiment> FindExperiment(const std::vector<v1::Experiment>& all,
                                              const std::string& name);

// kAborted unless `etag` is empty or the experiment's own.
absl::Status CheckEtag(const v1::Experiment& experiment, const std::string& etag);

// A draft, with nothing in fields that are output only. Precondition: CheckDefinition finds no
// fault.
v1::Experiment Drafted(v1::Experiment experiment, absl::Time now);

// It runs, in the first slice of its layer that is wide enough.
absl::StatusOr<v1::Experiment> Started(const v1::Experiment& experiment,
                                       const std::vector<v1::Experiment>& all, absl::Time now);

// It is over. One that is stopped stays as it is; a draft cannot be stopped.
absl::StatusOr<v1::Experiment> Stopped(const v1::Experiment& experiment, const std::string& reason,
                                       absl::Time now);

// wanted: the fields that a client sets, output-only ones as they were; checked. If it runs and its
// units move, a new bucket version, and a slice of its own if it had to grow.
absl::StatusOr<v1::Experiment> Changed(const v1::Experiment& experiment, v1::Experiment wanted,
                                       bool allow_rebucket, const std::vector<v1::Experiment>& all);

// Fields of Experiment that a client may set.
std::vector<std::string> SettableFields();

}  // namespace epikv
