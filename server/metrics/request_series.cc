#include "server/metrics/request_series.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/time/time.h"
#include "runtime/base/reason.h"
#include "runtime/base/steady_time.h"

namespace epikv {
namespace {

using prometheus::Counter;
using prometheus::Family;
using prometheus::Labels;

// The closed sets of label values.
constexpr absl::string_view kPhases[] = {"prefill", "decode"};
constexpr absl::string_view kTierEvents[] = {"demoted", "recalled", "forgotten", "fetched"};
constexpr absl::string_view kOperations[] = {"text_completion", "chat", "score"};
constexpr absl::string_view kEndReasons[] = {
    "length", "end",         "stop_token", "stop_string", "deadline", "deadline_infeasible",
    "error",  "slow_reader", "drained",    "cancelled"};
constexpr size_t kNumFailures = 6;  // of the reasons, the last ones
constexpr absl::string_view kPolicyErrors[] = {kPolicyThrew, kPolicyStatus, kPolicyInvalidSet};

Bounds KvTokenBounds() { return PowersOfTwo(5, 17); }

}  // namespace

absl::string_view FinishLabel(const Finished& finished) {
  switch (finished.reason) {
    case FinishReason::kLength:
      return "length";
    case FinishReason::kEnd:
      return "end";
    case FinishReason::kStopToken:
      return "stop_token";
    case FinishReason::kStopString:
      return "stop_string";
    case FinishReason::kDeadline:  // dropped from the queue, or at its deadline
      return ReasonOf(finished.status) == kDeadlineInfeasible ? "deadline_infeasible" : "deadline";
    case FinishReason::kError:
      return "error";
    case FinishReason::kCancelled:
      break;
  }
  switch (finished.status.code()) {
    case absl::StatusCode::kDeadlineExceeded:
      return "deadline";
    case absl::StatusCode::kResourceExhausted:
      return "slow_reader";
    case absl::StatusCode::kUnavailable:
      return "drained";
    default:
      return "cancelled";
  }
}

absl::string_view OperationOf(const Request& request) {
  return kOperations[!request.forced.empty() ? 2 : request.chat ? 1 : 0];
}

RequestSeries::RequestSeries(Declarations& declare)
    : prefill_(declare, "epikv_request_prefill_seconds",
               "From admission to the first output token.", 1, Decades(.001, 2000)),
      decode_(declare, "epikv_request_decode_seconds", "From the first to the last output token.",
              1, Decades(.001, 2000)),
      prefix_queried_(
          declare
              .Counters(
                  "epikv_prefix_cache_queried_tokens_total",
                  "Prompt tokens of admitted requests, without those that bypass the prefix cache.",
                  1)
              .Add({})),
      prefix_hit_(declare
                      .Counters("epikv_prefix_cache_hit_tokens_total",
                                "Prompt tokens that were copied from the prefix cache.", 1)
                      .Add({})),
      packet_tokens_(declare
                         .Counters("epikv_packet_prompt_tokens_total",
                                   "Prompt tokens of admitted requests that packets had.", 1)
                         .Add({})),
      folded_(declare
                  .Counters("epikv_metrics_label_overflow_total",
                            "Ended requests that are counted under policy or arm \"other\", "
                            "because a series of their own would exceed metrics_max_series.",
                            1)
                  .Add({})),
      tier_failures_(declare
                         .Counters("epikv_tier_failures_total",
                                   "Requests whose tier could not be opened, written or read: what "
                                   "they evicted from then on was dropped.",
                                   1)
                         .Add({})),
      tier_seconds_(declare
                        .Counters("epikv_tier_seconds_total",
                                  "Wall time of moving entries to the tier and back, of requests "
                                  "that have ended.",
                                  1)
                        .Add({})),
      doubted_steps_(declare
                         .Counters("epikv_doubted_steps_total",
                                   "Decode steps of requests that have ended which ran a second "
                                   "time, with tokens of the tier, as their next token was "
                                   "uncertain.",
                                   1)
                         .Add({})) {
  Family<Counter>& entries = declare.Counters(
      "epikv_tier_entries_total",
      "Entries of requests that have ended, by what became of them. demoted: they were evicted and "
      "went to the tier; recalled: back to the cache; forgotten: the tier was full; fetched: "
      "attended to there, each time.",
      std::size(kTierEvents));
  for (size_t i = 0; i < std::size(kTierEvents); ++i) {
    tier_entries_[i] = &entries.Add({{"event", std::string(kTierEvents[i])}});
  }
}

void RequestSeries::OnAdmitted(const Request& request, int64_t cached) {
  packet_tokens_.Increment(static_cast<double>(request.packet_tokens));
  if (request.bypass_prefix_cache) return;
  prefix_queried_.Increment(static_cast<double>(request.prompt.size()));
  prefix_hit_.Increment(static_cast<double>(cached));
}

void RequestSeries::OnFinished(const Finished& finished) {
  const TierUsage& tier = finished.kv.tier;
  const int64_t entries[] = {tier.demoted, tier.recalled, tier.forgotten, tier.fetched};
  for (size_t i = 0; i < std::size(entries); ++i) {
    tier_entries_[i]->Increment(static_cast<double>(entries[i]));
  }
  if (tier.failed) tier_failures_.Increment();
  tier_seconds_.Increment(Seconds(tier.time));
  doubted_steps_.Increment(static_cast<double>(tier.doubted_steps));
  if (finished.output_tokens == 0) return;
  prefill_.Of({}).Observe(Seconds(finished.timings.prefill));
  decode_.Of({}).Observe(Seconds(finished.timings.decode));
}

ArmSeries::ArmSeries(const std::string& model, std::string arm, SeriesBudget& budget)
    : arm_(std::move(arm)),
      of_policy_(registry_, {{"model", model}}),
      labels_(budget, of_policy_),
      duration_(of_policy_, "gen_ai_server_request_duration_seconds",
                "Time from arrival to the end, by operation and error_type (empty: it ended well).",
                std::size(kOperations) * (kNumFailures + 1), RequestBounds()),
      queue_(of_policy_, "epikv_request_queue_seconds", "From arrival to admission.", 1,
             Decades(.001, 2000)),
      first_token_(of_policy_, "gen_ai_server_time_to_first_token_seconds",
                   "From arrival to the first output token.", 1, FirstTokenBounds()),
      gap_(of_policy_, "epikv_inter_token_latency_seconds",
           "Time between consecutive tokens of a stream, but where it waited for its reader; one "
           "observation for each decoded token.",
           1, PerTokenBounds()),
      per_token_(of_policy_, "gen_ai_server_time_per_output_token_seconds",
                 "Mean time of a request's output tokens after the first.", 1, PerTokenBounds()),
      budget_(of_policy_, "epikv_request_kv_budget_tokens", "A request's KV budget.", 1,
              KvTokenBounds()),
      peak_(of_policy_, "epikv_request_kv_peak_tokens", "Most tokens that a request held.", 1,
            KvTokenBounds()),
      final_held_(of_policy_, "epikv_request_kv_final_tokens",
                  "Tokens that a request held at its end.", 1, KvTokenBounds()),
      kept_(of_policy_, "epikv_request_kv_kept_ratio",
            "Share of a request's cached tokens that it held at its end.", 1,
            {.05, .1, .15, .2, .25, .3, .4, .5, .6, .7, .8, .9, 1}),
      mass_(of_policy_, "epikv_evicted_attention_mass_ratio",
            "Measured in some rounds while decoding: share of the newest query's attention that "
            "went to the evicted tokens.",
            1, {0, .001, .002, .005, .01, .02, .05, .1, .2, .5}),
      finished_(of_policy_.Counters("epikv_requests_finished_total",
                                    "Requests that have ended, by reason.",
                                    std::size(kEndReasons))),
      tokens_(of_policy_.Counters("epikv_tokens_total",
                                  "Tokens of requests that have ended, by kind: of prompts; of "
                                  "these, the ones copied from the prefix cache; of outputs.",
                                  3)),
      evicted_entries_(of_policy_.Counters(
          "epikv_kv_entries_evicted_total",
          "Entries evicted; one is a token of one layer and KV head.", std::size(kPhases))),
      evicted_tokens_(of_policy_.Counters("epikv_kv_tokens_evicted_total",
                                          "Evicted entries divided by layers x KV heads.",
                                          std::size(kPhases))),
      rounds_(of_policy_.Counters("epikv_kv_eviction_rounds_total",
                                  "Evictions that removed at least one entry.",
                                  std::size(kPhases))),
      overrun_(of_policy_.Counters("epikv_kv_budget_overrun_tokens_total",
                                   "Tokens held above a request's reservation. Must stay 0.", 1)),
      policy_errors_(of_policy_.Counters("epikv_policy_errors_total",
                                         "Requests that failed because of their policy: it threw, "
                                         "returned an error, or named an invalid set of tokens.",
                                         std::size(kPolicyErrors))) {}

ArmSeries::OfPolicy& ArmSeries::Of(const Request& request) {
  const absl::string_view policy = labels_.Of(request.spec->name);
  const auto known = by_policy_.find(policy);
  if (known != by_policy_.end()) return known->second;
  const Labels labels{{"policy", std::string(policy)}, {"arm", arm_}};
  auto by_phase = [&](Family<Counter>& family) {
    return std::array<Counter*, 2>{&family.Add(With(labels, "phase", kPhases[0])),
                                   &family.Add(With(labels, "phase", kPhases[1]))};
  };
  OfPolicy series{.labels = labels,
                  .queue = queue_.Of(labels),
                  .first_token = first_token_.Of(labels),
                  .gap = gap_.Of(labels),
                  .per_token = per_token_.Of(labels),
                  .budget = budget_.Of(labels),
                  .peak = peak_.Of(labels),
                  .final_held = final_held_.Of(labels),
                  .kept = kept_.Of(labels),
                  .mass = mass_.Of(labels),
                  .prompt_tokens = tokens_.Add(With(labels, "kind", "prompt")),
                  .cached_prompt_tokens = tokens_.Add(With(labels, "kind", "prompt_cached")),
                  .output_tokens = tokens_.Add(With(labels, "kind", "output")),
                  .overrun = overrun_.Add(labels),
                  .evicted_entries = by_phase(evicted_entries_),
                  .evicted_tokens = by_phase(evicted_tokens_),
                  .rounds = by_phase(rounds_)};
  for (absl::string_view kind : kPolicyErrors) policy_errors_.Add(With(labels, "kind", kind));
  return by_policy_.emplace(policy, std::move(series)).first->second;
}

void ArmSeries::OnAdmitted(const Request& request, absl::Duration queued) {
  Of(request).queue.Observe(Seconds(queued));
}

void ArmSeries::OnToken(const Request& request, absl::Duration since_last) {
  Of(request).gap.Observe(Seconds(since_last));
}

void ArmSeries::OnFirstToken(const Request& request, absl::Duration since_arrival) {
  Of(request).first_token.Observe(Seconds(since_arrival));
}

void ArmSeries::OnEvicted(const EvictedStats& evicted, KvScale scale) {
  OfPolicy& policy = Of(evicted.request);
  const size_t phase = evicted.in_prefill ? 0 : 1;
  const double entries = static_cast<double>(evicted.entries);
  policy.evicted_entries[phase]->Increment(entries);
  policy.evicted_tokens[phase]->Increment(entries / static_cast<double>(scale.lanes));
  policy.rounds[phase]->Increment();
  if (evicted.attention_mass.has_value()) policy.mass.Observe(*evicted.attention_mass);
}

void ArmSeries::OnFinished(const Request& request, const Finished& finished, KvScale scale) {
  const OfPolicy& policy = Of(request);
  CountOutcome(policy, request, finished);
  if (finished.output_tokens > 1) {
    policy.per_token.Observe(Seconds(finished.timings.decode) /
                             static_cast<double>(finished.output_tokens - 1));
  }
  if (finished.kv.peak_entries > 0) CountKv(policy, request, finished.kv, scale);
}

void ArmSeries::CountOutcome(const OfPolicy& policy, const Request& request,
                             const Finished& finished) {
  const absl::string_view reason = FinishLabel(finished);
  finished_.Add(With(policy.labels, "reason", reason)).Increment();
  if (ReasonOf(finished.status) == kPolicyFailed) {
    const std::string kind = PolicyErrorOf(finished.status);
    policy_errors_.Add(With(policy.labels, "kind", KnownOr(kPolicyErrors, kind, kPolicyStatus)))
        .Increment();
  }
  const Labels labels = With(policy.labels, "gen_ai_operation_name", OperationOf(request));
  duration_.Of(With(labels, "error_type", finished.status.ok() ? "" : reason))
      .Observe(Seconds(SteadyNow() - request.arrival));
  policy.prompt_tokens.Increment(static_cast<double>(finished.prompt_tokens));
  policy.cached_prompt_tokens.Increment(static_cast<double>(finished.cached_prompt_tokens));
  policy.output_tokens.Increment(static_cast<double>(finished.output_tokens));
}

void ArmSeries::CountKv(const OfPolicy& policy, const Request& request, const KvUsage& kv,
                        KvScale scale) {
  const double lanes = static_cast<double>(scale.lanes);
  const double held = static_cast<double>(kv.final_entries);
  policy.budget.Observe(static_cast<double>(request.budget));
  policy.peak.Observe(static_cast<double>(kv.peak_entries) / lanes);
  policy.final_held.Observe(held / lanes);
  policy.kept.Observe(held / std::max(1.0, held + static_cast<double>(kv.evicted_entries)));
  const int64_t over = std::max<int64_t>(0, kv.peak_bytes - request.demand.peak_bytes());
  policy.overrun.Increment(static_cast<double>(over) / static_cast<double>(scale.bytes_per_token));
}

}  // namespace epikv
