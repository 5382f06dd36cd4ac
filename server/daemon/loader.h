#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "runtime/engine/core_budget.h"
#include "server/base/log.h"
#include "server/daemon/config.h"
#include "server/daemon/settings.h"
#include "server/metrics/metrics.h"
#include "server/models/models.h"

namespace epikv {

// Cores that engines may use: the quota minus one, for gRPC and the rest, or more if asked.
int64_t EngineCores(const Config& config);

// Loads models and puts them behind engines, as the configuration says.
class Loader {
 public:
  Loader(const Settings& settings, const Log& log, CoreBudget& cores, Metrics& metrics)
      : settings_(settings), log_(log), cores_(cores), metrics_(metrics) {}

  // Any thread. Takes seconds to minutes.
  absl::StatusOr<ModelPtr> Load(const ModelSource& source) const;
  // All of them, into service, in order. The error names the file.
  absl::Status LoadAll(const std::vector<ModelSource>& sources, Settings& settings,
                       Models& models) const;

 private:
  const Settings& settings_;
  const Log& log_;
  CoreBudget& cores_;
  Metrics& metrics_;
};

}  // namespace epikv
