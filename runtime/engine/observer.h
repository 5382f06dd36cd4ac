#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "runtime/request/request.h"
#include "runtime/step/step_stats.h"

namespace epikv {

// What a live request is doing, and what it waits for.
enum class RequestState {
  kQueued,  // holds no KV yet
  kPrefill,
  kDecode,
};
enum class WaitsFor {
  kNothing,
  kTurn,    // others are before it in the queue
  kKv,      // the head of the queue: room in the KV pool
  kPlace,   // the head of the queue: one of max_running_requests
  kReader,  // running: its client, who does not read
};

// A live request, for people who look.
struct RequestFacts {
  std::string id;
  int64_t completion = 0;  // of several that run
  RequestState state = RequestState::kQueued;
  WaitsFor waits_for = WaitsFor::kNothing;
  std::string policy;
  int64_t budget = 0;  // tokens
  int64_t prompt_tokens = 0, cached_tokens = 0, output_tokens = 0, max_output_tokens = 0;
  int64_t kv_used_bytes = 0;
  int64_t kv_reserved_bytes = 0;  // of a queued one: what it will reserve
  absl::Time arrival, deadline;
};

struct EvictedStats {
  const Request& request;
  int64_t entries = 0;
  bool in_prefill = false;
  absl::Duration time;                   // of choosing and removing them
  std::optional<double> attention_mass;  // see SettleOutcome
};

// Watches the engine: metrics, logs and tests all see the same events. Called on the engine
// thread with no lock held; must not block, throw, or call back into the engine.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  // Holds its KV from now on. Not of a request that ends in the queue, or cannot be opened.
  // cached: tokens of its prompt that it starts with, from the prefix cache.
  virtual void OnAdmitted(const Request& request, absl::Duration queued, int64_t cached) {}
  // After each step, and (with 0 sequences) when nothing could run.
  virtual void OnStep(const StepStats& step) {}
  virtual void OnFirstToken(const Request& request, absl::Duration since_arrival) {}
  // Of each generated token but the first, and but those that waited for their reader.
  virtual void OnToken(const Request& request, absl::Duration since_last) {}
  virtual void OnEvicted(const EvictedStats& evicted) {}
  // Once for every submitted request, admitted or not.
  virtual void OnFinished(const Request& request, const Finished& finished) {}
};

}  // namespace epikv
