#pragma once

#include <prometheus/metric_family.h>
#include <prometheus/registry.h>

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "policies/spec.h"
#include "runtime/engine/observer.h"
#include "server/metrics/metric_families.h"

namespace epikv {

// How a request ended, in one word: "length", "stop_token", "cancelled", ... A cancel says by its
// status who cancelled.
absl::string_view FinishLabel(const Finished& finished);

// What OpenTelemetry calls it: gen_ai.operation.name.
absl::string_view OperationOf(const Request& request);

// What turns entries and bytes of a model's KV cache into tokens.
struct KvScale {
  int64_t lanes = 1;            // layers x KV heads
  int64_t bytes_per_token = 1;  // K and V of all lanes
};

// What each request adds to, whatever its policy: times and prompt reuse. One thread at a time.
class RequestSeries {
 public:
  explicit RequestSeries(Declarations& declare);

  void OnAdmitted(const Request& request, int64_t cached);
  void OnFinished(const Finished& finished);
  // A request counts for a policy or an arm "other".
  void OnFolded() { folded_.Increment(); }

 private:
  HistogramFamily prefill_, decode_;
  prometheus::Counter &prefix_queried_, &prefix_hit_, &packet_tokens_, &folded_;
  prometheus::Counter &tier_failures_, &tier_seconds_, &doubted_steps_;
  std::array<prometheus::Counter*, 4> tier_entries_{};  // by event
};

// What requests of one arm add to, by policy: latency, tokens, KV facts and evictions. They go with
// it, all at once. One thread at a time.
class ArmSeries {
 public:
  // budget, which outlives this, has given what `own_series` says: those of policy "other".
  ArmSeries(const std::string& model, std::string arm, SeriesBudget& budget);

  int64_t own_series() const { return of_policy_.bound(); }

  void OnAdmitted(const Request& request, absl::Duration queued);
  void OnFirstToken(const Request& request, absl::Duration since_arrival);
  void OnToken(const Request& request, absl::Duration since_last);
  void OnEvicted(const EvictedStats& evicted, KvScale scale);
  void OnFinished(const Request& request, const Finished& finished, KvScale scale);
  // Whether the policy has series of its own here.
  bool Knows(const Request& request) {
    return labels_.Of(request.spec->name) != PolicyLabels::kOther;
  }

  std::vector<prometheus::MetricFamily> Collect() const { return registry_.Collect(); }

 private:
  // Of one policy; made when its first request comes.
  struct OfPolicy {
    prometheus::Labels labels;
    prometheus::Histogram &queue, &first_token, &gap, &per_token;
    prometheus::Histogram &budget, &peak, &final_held, &kept, &mass;
    prometheus::Counter &prompt_tokens, &cached_prompt_tokens, &output_tokens, &overrun;
    std::array<prometheus::Counter*, 2> evicted_entries, evicted_tokens, rounds;  // by phase
  };
  OfPolicy& Of(const Request& request);
  void CountOutcome(const OfPolicy& policy, const Request& request, const Finished& finished);
  void CountKv(const OfPolicy& policy, const Request& request, const KvUsage& kv, KvScale scale);

  const std::string arm_;
  prometheus::Registry registry_;
  Declarations of_policy_;
  PolicyLabels labels_;
  HistogramFamily duration_, queue_, first_token_, gap_, per_token_;
  HistogramFamily budget_, peak_, final_held_, kept_, mass_;
  prometheus::Family<prometheus::Counter>&finished_, &tokens_;
  prometheus::Family<prometheus::Counter>&evicted_entries_, &evicted_tokens_, &rounds_;
  prometheus::Family<prometheus::Counter>&overrun_, &policy_errors_;
  std::map<std::string, OfPolicy, std::less<>> by_policy_;
};

}  // namespace epikv
