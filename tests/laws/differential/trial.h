#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/attention/attention.h"
#include "runtime/constraints/constraint.h"
#include "runtime/engine/engine.h"
#include "runtime/request/request.h"

// What the differential fuzzer tries: requests and what their clients do, on engines set up in some
// way. A trial is drawn from a seed, or read from JSON, in which what is not said is the default.

namespace epikv {

// What a daemon may be told of one of its models.
struct EngineSetup {
  std::string model = "gqa";  // tests/fixtures/make_models.py
  int64_t pool_tokens = 8000;
  double prefix_share = 0;  // of the pool
  int64_t chunk_tokens = 32;
  int64_t max_step_tokens = 512;
  int64_t max_running = 256;
  int64_t constraint_work = EngineOptions().constraint_work;
  int64_t max_round_pairs = SchedulerOptions().max_round_pairs;
  DecodeKernel decode_kernel = DecodeKernel::kBatch;
  PrefillKernel prefill_kernel = PrefillKernel::kBatch;
  KvDType kv_dtype = KvDType::kModel;
  bool deterministic = false;
  bool device_path = false;
  bool recorded = false;  // its decode steps
  int64_t mass_interval = 0;
};

// One request, and its client. Steps are the engines', counted from the trial's begin; "after" is
// counted from when the request is submitted.
struct Ask {
  int64_t engine = 0;
  int64_t at_step = 0;
  // The prompt: the first `shared` tokens of text `shared_text`, or prompt and output of the ask
  // that it continues; then `own` tokens of text `text`.
  int64_t shared = 0, own = 8;
  uint64_t shared_text = 0, text = 0;
  std::optional<int64_t> continues;  // an ask before it, of the same engine
  // The shared part comes in so many packets, which were cached alone; and evicted there, each lane
  // on its own.
  int64_t packets = 0;
  bool evicted_packets = false;
  int64_t forced = 0;      // tokens to score; 0: it generates
  RequestOptions options;  // without id, prompt, forced, constraint, deadline
  std::optional<ConstraintText> constraint;
  bool idle = false;  // by SubmitIdle, once nothing is live
  std::optional<int64_t> cancel_after, deadline_after;
  std::vector<std::pair<int64_t, int64_t>> pauses;  // steps in which its client does not read
};

struct Trial {
  std::vector<EngineSetup> engines;
  std::vector<Ask> asks;
  std::vector<int64_t> drops;  // steps before which cached prefixes are dropped
};

// The same seed gives the same trial, as long as this file stays as it is.
Trial DrawTrial(uint64_t seed);

// Of drawn trials.
std::vector<std::string> TrialModels();

// What is left out has its default, so that a small trial is a short text.
nlohmann::json ToJson(const Trial& trial);
// Throws std::exception for what is no trial.
Trial TrialOf(const nlohmann::json& json);

// `count` tokens of a text, no two alike within `vocab_size` of each other.
std::vector<int32_t> TokensOfText(uint64_t text, int64_t count, int64_t vocab_size);

}  // namespace epikv
