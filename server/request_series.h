#pragma once

#include <array>
#include <functional>
#include <map>
#include <string>

#include "policies/spec.h"
#include "runtime/observer.h"
#include "server/metric_families.h"

namespace epikv {

// How a request ended, in one word: "length", "stop_token", "cancelled", ... A cancel says by its
// status who cancelled.
absl::string_view FinishLabel(const Finished& finished);

// What turns entries and bytes of a model's KV cache into tokens.
struct KvScale {
  int64_t lanes = 1;            // layers x KV heads
  int64_t bytes_per_token = 1;  // K and V of all lanes
};

// What each request adds to: latency, tokens, KV facts and evictions, by policy and arm. One thread
// at a time.
class RequestSeries {
 public:
  // of_policy: declares the series that each policy in use has. labels: outlives this.
  RequestSeries(Declarations& declare, Declarations& of_policy, PolicyLabels& labels);

  void OnAdmitted(const Request& request, absl::Duration queued, int64_t cached);
  void OnFirstToken(const Request& request, absl::Duration since_arrival);
  void OnEvicted(const EvictedStats& evicted, KvScale scale);
  void OnFinished(const Request& request, const Finished& finished, KvScale scale);

 private:
  // Of one policy; made when its first request comes.
  struct OfPolicy {
    prometheus::Labels labels;
    prometheus::Histogram &first_token, &per_token;
    prometheus::Histogram &budget, &peak, &final_held, &kept, &mass;
    prometheus::Counter &prompt_tokens, &cached_prompt_tokens, &output_tokens, &overrun;
    std::array<prometheus::Counter*, 2> evicted_entries, evicted_tokens, rounds;  // by phase
  };
  OfPolicy& Of(const Request& request);
  void CountOutcome(const OfPolicy& policy, const Request& request, const Finished& finished);
  void CountTimes(const OfPolicy& policy, const Finished& finished);
  void CountKv(const OfPolicy& policy, const Request& request, const KvUsage& kv, KvScale scale);

  PolicyLabels& labels_;
  HistogramFamily duration_, first_token_, per_token_, queue_, prefill_, decode_;
  HistogramFamily budget_, peak_, final_held_, kept_, mass_;
  prometheus::Family<prometheus::Counter>&finished_, &tokens_;
  prometheus::Family<prometheus::Counter>&evicted_entries_, &evicted_tokens_, &rounds_;
  prometheus::Family<prometheus::Counter>&overrun_, &policy_errors_;
  prometheus::Counter &prefix_queried_, &prefix_hit_;
  prometheus::Counter& folded_;
  std::map<std::string, OfPolicy, std::less<>> by_policy_;
};

}  // namespace epikv
