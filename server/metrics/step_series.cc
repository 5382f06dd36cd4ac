#include "server/metrics/step_series.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/time/time.h"
#include "runtime/base/steady_time.h"

namespace epikv {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;

constexpr const char* kStages[kNumStages] = {"schedule", "draft",   "forward", "attention", "taps",
                                             "sample",   "deliver", "observe", "evict"};

bool HasCpu(int stage) { return stage != static_cast<int>(Stage::kAttention); }

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

// Requests by priority, and by `reason` where that is not empty.
MetricFamily RequestGauge(const char* name, const char* help, const std::string& model,
                          const std::vector<std::pair<const char*, ByPriority>>& by_reason) {
  MetricFamily family{
      .name = name, .help = help, .type = prometheus::MetricType::Gauge, .metric = {}};
  for (const auto& [reason, requests] : by_reason) {
    for (int i = 0; i < kNumPriorities; ++i) {
      ClientMetric metric;
      metric.label = {{"model", model}, {"priority", kPriorities[i]}};
      if (*reason != '\0') metric.label.push_back({"reason", reason});
      metric.gauge.value = static_cast<double>(requests[i]);
      family.metric.push_back(std::move(metric));
    }
  }
  return family;
}

void AddTo(const ByPriority& requests, ByPriority& to) {
  for (int i = 0; i < kNumPriorities; ++i) to[i] += requests[i];
}

double Sum(const ByPriority& requests) {
  return static_cast<double>(std::accumulate(requests.begin(), requests.end(), int64_t{0}));
}

}  // namespace

void FillGauges::Add(const EngineFill& engine) {
  const StepStats& last = engine.last;
  used_ += static_cast<double>(last.kv_used_bytes);
  reserved_ += static_cast<double>(last.kv_reserved_bytes);
  prefixes_ += static_cast<double>(last.kv_prefix_bytes);
  capacity_ += static_cast<double>(last.kv_capacity_bytes);
  tier_reserved_ += static_cast<double>(last.tier_reserved_bytes);
  tier_capacity_ += static_cast<double>(last.tier_capacity_bytes);
  peak_used_ += static_cast<double>(engine.peak_used_bytes);
  weights_ += static_cast<double>(engine.weight_bytes);
  scratch_ += static_cast<double>(engine.scratch_bytes);
  touched_ += static_cast<double>(last.kv_touched_bytes);
  signals_ += static_cast<double>(last.signal_bytes);
  if (engine.constraint_bytes != nullptr) {
    constraints_ += static_cast<double>(engine.constraint_bytes->load());
  }
  AddTo(last.running_by_priority, running_);
  const bool for_place = last.running >= engine.max_running_requests;
  AddTo(last.waiting_by_priority, for_place ? waiting_for_place_ : waiting_for_kv_);
  if (last.predicted_wait.has_value()) predicted_wait_ = Seconds(*last.predicted_wait);
}

std::vector<MetricFamily> FillGauges::Families(const std::string& model) const {
  const double whole = std::max(1.0, capacity_);
  std::vector<std::pair<const char*, double>> wait;  // nothing before steps were measured
  if (predicted_wait_.has_value()) wait.push_back({"", *predicted_wait_});
  return {
      GaugeOf("epikv_kv_bytes",
              "Bytes of the KV pool by use: used; reserved by running requests and not yet used; "
              "cached prefixes; free. They sum to the capacity.",
              model, "state",
              {{"used", used_},
               {"reserved", reserved_ - used_},
               {"cached_prefix", prefixes_},
               {"free", capacity_ - reserved_ - prefixes_}}),
      GaugeOf("epikv_kv_capacity_bytes", "Bytes of the KV pool.", model, "", {{"", capacity_}}),
      GaugeOf("epikv_tier_bytes",
              "Bytes of the tier below the KV pool: reserved by running requests; free.", model,
              "state", {{"reserved", tier_reserved_}, {"free", tier_capacity_ - tier_reserved_}}),
      GaugeOf("epikv_kv_peak_used_bytes", "Most bytes used since the start.", model, "",
              {{"", peak_used_}}),
      GaugeOf("epikv_torch_memory_bytes",
              "Memory of tensors: weights as served; the KV pool; and the largest forward (the "
              "largest step, with logits of every row), which comes and goes, as measured at load.",
              model, "kind",
              {{"weights", weights_}, {"kv_pool", capacity_}, {"scratch", scratch_}}),
      GaugeOf(
          "epikv_resident_memory_bytes",
          "Memory of the process that is taken as it is needed: kv_touched, the KV pool up to the "
          "last row that was ever held, which stays, 0 on a GPU; signals, attention rows of "
          "running requests; constraints, compiled ones that are in use or remembered, and what "
          "their "
          "completions keep of them.",
          model, "kind",
          {{"kv_touched", touched_}, {"signals", signals_}, {"constraints", constraints_}}),
      GaugeOf("epikv_kv_usage_ratio", "Used share of the KV pool.", model, "",
              {{"", used_ / whole}}),
      GaugeOf("epikv_kv_reserved_ratio",
              "Share of the KV pool that running requests have reserved, used or not.", model, "",
              {{"", reserved_ / whole}}),
      RequestGauge("epikv_requests_running",
                   "Requests that hold KV cache. Each of several completions counts.", model,
                   {{"", running_}}),
      RequestGauge("epikv_requests_waiting",
                   "Requests in the queue, by what the first one waits for: room in the KV pool, "
                   "or one of max_running_requests.",
                   model, {{"kv", waiting_for_kv_}, {"running", waiting_for_place_}}),
      GaugeOf("epikv_load_running_requests",
              "Requests that hold KV cache, of all priorities: one series, for what cannot sum.",
              model, "", {{"", Sum(running_)}}),
      GaugeOf("epikv_load_waiting_requests",
              "Requests in the queue, of all priorities: one series, for what cannot sum.", model,
              "", {{"", Sum(waiting_for_kv_) + Sum(waiting_for_place_)}}),
      GaugeOf("epikv_predicted_wait_seconds",
              "How long a request would wait behind all that waits now.", model, "", wait)};
}

StepSeries::StepSeries(Declarations& declare, Declarations& of_policy)
    : eviction_(
          of_policy, "epikv_kv_eviction_seconds",
          "Wall time of one request's round: its policy chooses victims, and they are removed.", 1,
          Decades(.00001, 1)),
      batch_tokens_(HistogramFamily(declare, "epikv_step_batch_tokens", "Tokens in a step.", 1,
                                    PowersOfTwo(0, 14))
                        .Of({})),
      batch_sequences_(HistogramFamily(declare, "epikv_step_batch_sequences",
                                       "Sequences in a step.", 1, PowersOfTwo(0, 10))
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
                                "Longest time since the start that moving rows for one admission "
                                "took. All streams wait meanwhile.",
                                1)
                        .Add({})) {
  HistogramFamily steps(declare, "epikv_step_seconds",
                        "Wall time of a step, by what it ran: prefill, decode or both (mixed).", 3,
                        Decades(.0005, 50));
  by_phase_ = {&steps.Of({{"phase", "prefill"}}), &steps.Of({{"phase", "decode"}}),
               &steps.Of({{"phase", "mixed"}})};
  auto& tokens = declare.Counters("epikv_step_tokens_total", "Tokens run in steps.", 2);
  tokens_ = {&tokens.Add({{"phase", "prefill"}}), &tokens.Add({{"phase", "decode"}})};
  auto& guesses = declare.Counters("epikv_guessed_tokens_total",
                                   "Guesses that steps ran, by whether they came true.", 2);
  guesses_ = {&guesses.Add({{"result", "accepted"}}), &guesses.Add({{"result", "rejected"}})};

  HistogramFamily stages(
      declare, "epikv_step_stage_seconds",
      "Wall time of a step's stage. `attention` and `taps` lie inside `forward`.", kNumStages,
      Decades(.00001, 10));
  auto& wall = declare.Counters("epikv_step_seconds_total",
                                "Wall time of steps, by stage. `attention` and `taps` lie inside "
                                "`forward`.",
                                kNumStages);
  auto& cpu =
      declare.Counters("epikv_step_cpu_seconds_total",
                       "CPU time of the engine's thread in steps, by stage.", kNumStages - 1);
  for (int i = 0; i < kNumStages; ++i) {
    stages_[i] = &stages.Of({{"stage", kStages[i]}});
    stage_wall_[i] = &wall.Add({{"stage", kStages[i]}});
    if (HasCpu(i)) stage_cpu_[i] = &cpu.Add({{"stage", kStages[i]}});
  }
}

void StepSeries::AddRound(absl::string_view policy, absl::Duration time) {
  auto known = rounds_.find(policy);
  if (known == rounds_.end()) {
    const std::string label(policy);
    known = rounds_.emplace(label, &eviction_.Of({{"policy", label}})).first;
  }
  known->second->Observe(Seconds(time));
}

void StepSeries::Add(const StepStats& step, StepBefore& before) {
  const int64_t read = step.prefill_tokens + step.pass_tokens;
  const size_t phase = step.decode_tokens == 0 ? 0 : read == 0 ? 1 : 2;
  by_phase_[phase]->Observe(Seconds(step.total_wall));
  for (int i = 0; i < kNumStages; ++i) {
    stages_[i]->Observe(Seconds(step.wall[i]));
    stage_wall_[i]->Increment(Seconds(step.wall[i]));
    if (HasCpu(i)) stage_cpu_[i]->Increment(Seconds(step.cpu[i]));
  }
  guesses_[0]->Increment(static_cast<double>(step.accepted_tokens));
  guesses_[1]->Increment(static_cast<double>(step.guessed_tokens - step.accepted_tokens));
  engine_cpu_.Increment(Seconds(step.total_cpu));
  rows_moved_.Increment(static_cast<double>(step.kv_rows_moved - before.kv_rows_moved));
  longest_move_.Set(std::max(longest_move_.Value(), Seconds(step.kv_longest_move)));
  tokens_[0]->Increment(static_cast<double>(step.prefill_tokens));
  tokens_[1]->Increment(static_cast<double>(step.decode_tokens));
  batch_tokens_.Observe(static_cast<double>(read + step.decode_tokens));
  batch_sequences_.Observe(static_cast<double>(step.sequences));
  before = {.end = SteadyNow(), .kv_rows_moved = step.kv_rows_moved};
}

}  // namespace epikv
