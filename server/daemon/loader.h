#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/engine/core_budget.h"
#include "runtime/ranks/ranks.h"
#include "server/base/log.h"
#include "server/daemon/config.h"
#include "server/daemon/settings.h"
#include "server/metrics/metrics.h"
#include "server/models/models.h"

namespace epikv {

// Cores that engines may use: the quota minus one, for gRPC and the rest, or more if asked.
int64_t EngineCores(const Config& config);

// The life of a rank of --tensor_parallel that is not rank 0: loads the model's shard, and serves
// until rank 0 ends.
absl::Status ServeAsRank(const Config& config, std::shared_ptr<Ranks> ranks);

// Loads models and puts them behind engines, as the configuration says.
class Loader {
 public:
  // ranks: rank 0's, of --tensor_parallel; null: there are no others.
  Loader(const Settings& settings, const Log& log, CoreBudget& cores, Metrics& metrics,
         std::shared_ptr<Ranks> ranks)
      : settings_(settings),
        log_(log),
        cores_(cores),
        metrics_(metrics),
        ranks_(std::move(ranks)) {}

  // Any thread. Takes seconds to minutes. Ranks load one model.
  absl::StatusOr<ModelPtr> Load(const ModelSource& source) const;
  // All of them, into service, in order. The error names the file.
  absl::Status LoadAll(const std::vector<ModelSource>& sources, Settings& settings,
                       Models& models) const;

 private:
  const Settings& settings_;
  const Log& log_;
  CoreBudget& cores_;
  Metrics& metrics_;
  const std::shared_ptr<Ranks> ranks_;
  mutable std::atomic<bool> ranks_serve_ = false;
};

}  // namespace epikv
