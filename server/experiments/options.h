#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"

namespace epikv {

// Settings of experiments. What each means: deploy/epikvd.textproto.
struct ExperimentsOptions {
  std::string store;  // a file, or postgresql://...; empty: there are no experiments
  std::string spool;  // folder
  int64_t spool_bytes = int64_t{256} << 20;
  absl::Duration retention = absl::InfiniteDuration();
  absl::Duration judge_every = absl::Minutes(1);
  // After an experiment's stop its requests end and Prometheus scrapes its last figures.
  absl::Duration series_outlive = absl::Minutes(10);
};

}  // namespace epikv
