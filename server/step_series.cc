#include "server/step_series.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"

namespace epikv {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;

constexpr const char* kStages[kNumStages] = {"schedule", "forward", "taps", "sample",
                                             "deliver",  "observe", "evict"};

// By Priority.
constexpr const char* kPriorities[kNumPriorities] = {"low", "normal", "high"};

// A gauge with one sample for each value of one label; of an empty label, with one sample.
MetricFamily GaugeOf(const char* name, const char* help, const std::string& model,
                     const char* label,
                     const std::vector<std::pair<const char*, double>>& samples) {
  MetricFamily family{
      .name = name, .help = help, .type = prometheus::MetricType::Gauge, .metric = {}};
  for (const auto& [value, number] : samples) {
    ClientMetric metric;
    metric.label.push_back({"model", model});
    if (*label != '\0') metric.label.push_back({label, value});
    metric.gauge.value = number;
    family.metric.push_back(std::move(metric));
  }
  return family;
}

// Requests by priority; `reason` and `other`, where not empty, are two more values of a label, of
// which the requests have the first.
MetricFamily RequestGauge(const char* name, const char* help, const std::string& model,
                          const std::array<int64_t, kNumPriorities>& requests,
                          const char* reason = "", const char* other = "") {
  MetricFamily family{
      .name = name, .help = help, .type = prometheus::MetricType::Gauge, .metric = {}};
  auto add = [&](int priority, const char* value, int64_t number) {
    ClientMetric metric;
    metric.label = {{"model", model}, {"priority", kPriorities[priority]}};
    if (*value != '\0') metric.label.push_back({"reason", value});
    metric.gauge.value = static_cast<double>(number);
    family.metric.push_back(std::move(metric));
  };
  for (int i = 0; i < kNumPriorities; ++i) {
    add(i, reason, requests[i]);
    if (*other != '\0') add(i, other, 0);
  }
  return family;
}

}  // namespace

EngineGauges::EngineGauges(std::string model, int64_t kv_capacity_bytes,
                           int64_t max_running_requests)
    : model_(std::move(model)), max_running_requests_(max_running_requests) {
  last_.kv_capacity_bytes = kv_capacity_bytes;
}

void EngineGauges::Set(const StepStats& step) {
  absl::MutexLock lock(&mu_);
  last_ = step;
  peak_used_bytes_ = std::max(peak_used_bytes_, step.kv_used_bytes);
}

std::vector<MetricFamily> EngineGauges::Collect() const {
  absl::MutexLock lock(&mu_);
  const double used = static_cast<double>(last_.kv_used_bytes);
  const double reserved = static_cast<double>(last_.kv_reserved_bytes);
  const double capacity = static_cast<double>(std::max<int64_t>(1, last_.kv_capacity_bytes));
  std::vector<std::pair<const char*, double>> wait;  // nothing before steps were measured
  if (last_.predicted_wait.has_value()) wait.push_back({"", Seconds(*last_.predicted_wait)});
  const bool for_place = last_.running >= max_running_requests_;
  return {GaugeOf("epikv_kv_bytes",
                  "Bytes of the KV pool: used, reserved by running requests and not yet used, "
                  "cached prefixes, free. They sum to the capacity.",
                  model_, "state",
                  {{"used", used},
                   {"reserved", reserved - used},
                   {"cached_prefix", 0},
                   {"free", capacity - reserved}}),
          GaugeOf("epikv_kv_capacity_bytes", "Bytes of the KV pool.", model_, "", {{"", capacity}}),
          GaugeOf("epikv_kv_peak_used_bytes", "Most bytes used since the start.", model_, "",
                  {{"", static_cast<double>(peak_used_bytes_)}}),
          GaugeOf("epikv_kv_usage_ratio", "Used share of the KV pool.", model_, "",
                  {{"", used / capacity}}),
          GaugeOf("epikv_kv_reserved_ratio",
                  "Share of the KV pool that running requests have reserved, used or not.", model_,
                  "", {{"", reserved / capacity}}),
          RequestGauge("epikv_requests_running", "Requests that hold KV cache.", model_,
                       last_.running_by_priority),
          RequestGauge("epikv_requests_waiting",
                       "Requests in the queue, by what the first of them waits for: room in the KV "
                       "pool, or a place among max_running_requests.",
                       model_, last_.waiting_by_priority, for_place ? "running" : "kv",
                       for_place ? "kv" : "running"),
          GaugeOf("epikv_predicted_wait_seconds",
                  "How long a request would wait behind all that waits now.", model_, "", wait)};
}

StepSeries::StepSeries(Declarations& declare, size_t num_policies)
    : gap_family_(declare, "epikv_inter_token_latency_seconds",
                  "Between consecutive tokens of a stream: one observation a decoded token.", 1,
                  PerTokenBounds()),
      eviction_(declare, "epikv_kv_eviction_seconds",
                "Wall time of evicting in a step, all requests together, by policy that evicted in "
                "it.",
                num_policies, Decades(.00001, 1)),
      gaps_(gap_family_.Of({})),
      batch_tokens_(HistogramFamily(declare, "epikv_step_batch_tokens", "Tokens of a step.", 1,
                                    PowersOfTwo(0, 14))
                        .Of({})),
      batch_sequences_(HistogramFamily(declare, "epikv_step_batch_sequences",
                                       "Sequences of a step.", 1, PowersOfTwo(0, 10))
                           .Of({})),
      engine_cpu_(declare
                      .Counters("epikv_engine_cpu_seconds_total",
                                "CPU time of the engine's thread in steps, all stages.", 1)
                      .Add({})),
      rows_moved_(declare
                      .Counters("epikv_kv_rows_moved_total",
                                "K/V rows moved so that a request's lanes fit in one place.", 1)
                      .Add({})),
      longest_move_(declare
                        .Gauges("epikv_kv_longest_move_seconds",
                                "The longest that one admission has moved rows, and all streams "
                                "stood still, since the start.",
                                1)
                        .Add({})) {
  HistogramFamily steps(declare, "epikv_step_seconds", "Wall time of a step, by what it ran.", 3,
                        Decades(.0005, 50));
  by_phase_ = {&steps.Of({{"phase", "prefill"}}), &steps.Of({{"phase", "decode"}}),
               &steps.Of({{"phase", "mixed"}})};
  auto& tokens = declare.Counters("epikv_step_tokens_total", "Tokens run, step by step.", 2);
  tokens_ = {&tokens.Add({{"phase", "prefill"}}), &tokens.Add({{"phase", "decode"}})};

  HistogramFamily stages(declare, "epikv_step_stage_seconds",
                         "Wall time of a step's stage. `taps` and `sample` lie inside `forward`.",
                         kNumStages, Decades(.00001, 10));
  auto& wall = declare.Counters("epikv_step_seconds_total",
                                "Wall time of steps, by stage. `taps` and `sample` lie inside "
                                "`forward`.",
                                kNumStages);
  auto& cpu = declare.Counters("epikv_step_cpu_seconds_total",
                               "CPU time of the engine's thread in steps, by stage.", kNumStages);
  for (int i = 0; i < kNumStages; ++i) {
    stages_[i] = &stages.Of({{"stage", kStages[i]}});
    stage_wall_[i] = &wall.Add({{"stage", kStages[i]}});
    stage_cpu_[i] = &cpu.Add({{"stage", kStages[i]}});
  }
}

void StepSeries::Add(const StepStats& step, const std::set<absl::string_view>& evicting) {
  const size_t phase = step.decode_tokens == 0 ? 0 : step.prefill_tokens == 0 ? 1 : 2;
  by_phase_[phase]->Observe(Seconds(step.total_wall));
  for (int i = 0; i < kNumStages; ++i) {
    stages_[i]->Observe(Seconds(step.wall[i]));
    stage_wall_[i]->Increment(Seconds(step.wall[i]));
    stage_cpu_[i]->Increment(Seconds(step.cpu[i]));
  }
  engine_cpu_.Increment(Seconds(step.total_cpu));
  rows_moved_.Increment(static_cast<double>(step.kv_rows_moved) - rows_moved_.Value());
  longest_move_.Set(Seconds(step.kv_longest_move));
  tokens_[0]->Increment(static_cast<double>(step.prefill_tokens));
  tokens_[1]->Increment(static_cast<double>(step.decode_tokens));
  batch_tokens_.Observe(static_cast<double>(step.prefill_tokens + step.decode_tokens));
  batch_sequences_.Observe(static_cast<double>(step.sequences));
  for (const absl::string_view policy : evicting) {
    eviction_.Of({{"policy", std::string(policy)}})
        .Observe(Seconds(step.wall[static_cast<int>(Stage::kEvict)]));
  }
  AddGaps(step);
}

// Every decoding sequence waited since the last step's end: one observation each, taken at once.
void StepSeries::AddGaps(const StepStats& step) {
  const absl::Time now = absl::Now();
  const double gap = Seconds(now - last_end_);
  if (step.decode_tokens > 0 && left_running_) {
    const Bounds& bounds = gap_family_.bounds();
    const auto bucket = std::lower_bound(bounds.begin(), bounds.end(), gap) - bounds.begin();
    std::vector<double> increments(bounds.size() + 1, 0.0);
    increments[bucket] = static_cast<double>(step.decode_tokens);
    gaps_.ObserveMultiple(increments, gap * static_cast<double>(step.decode_tokens));
  }
  last_end_ = now;
  left_running_ = step.running > 0;
}

}  // namespace epikv
