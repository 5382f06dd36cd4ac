#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"

namespace epikv {

// Of the replays of finished requests (see Shadow).
struct ShadowOptions {
  double share_of_requests = 0;  // that are sampled; 0: none
  double share_of_time = .1;     // of wall time, the most that replays take
  // Held at once, prompts counted.
  int64_t max_requests = 64;
  int64_t max_tokens = 1 << 18;
  // Likeliest tokens that are compared at each place; of a small vocabulary all. At 8 bytes each,
  // twice, a replay takes 4 MiB for a thousand output tokens.
  int64_t top = 256;
  int64_t longest = 1 << 15;  // prompt and output tokens of a request that is replayed
  int max_tries = 3;
  absl::Duration look_every = absl::Milliseconds(50);  // whether engines are idle
};

// Settings of experiments. What each means: deploy/epikvd.textproto.
struct ExperimentsOptions {
  std::string store;  // a file, or postgresql://...; empty: there are no experiments
  std::string spool;  // folder
  int64_t spool_bytes = int64_t{256} << 20;
  absl::Duration retention = absl::InfiniteDuration();
  absl::Duration judge_every = absl::Minutes(1);
  absl::Duration lost_after = absl::Hours(1);  // ReportOptions'
  // After an experiment's stop its requests end and Prometheus scrapes its last figures.
  absl::Duration series_outlive = absl::Minutes(10);
  ShadowOptions shadow;
};

}  // namespace epikv
