#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "epikv/v1/access_log.pb.h"
#include "epikv/v1/experiment_record.pb.h"
#include "server/experiments/live_experiments.h"

namespace epikv {

// Where requests meet experiments: all that generating needs of them. Thread-safe, and waits for
// nothing: neither for a store nor for a disk.
class Participation {
 public:
  virtual ~Participation() = default;

  // See LiveExperiments.
  virtual absl::StatusOr<Assignment> Assign(const Subject& subject) = 0;
  // Of a request that is taken: see Assignment::excluded.
  virtual void OnExcluded(const std::vector<std::string>& experiments) = 0;
  // Of a request that takes part; then, once, how it ended.
  virtual void OnBegan(v1::RequestBegan began) = 0;
  virtual void OnEnded(v1::RequestEnded ended) = 0;
};

// id: of RequestBegan. What was not measured is absent.
v1::RequestEnded EndOf(const std::string& id, const v1::AccessLogEntry& entry);

}  // namespace epikv
