#include "server/metrics/model_metrics.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "runtime/base/steady_time.h"

namespace epikv {
namespace {

constexpr absl::string_view kNoArm = "none";
constexpr absl::string_view kOtherArm = "other";

}  // namespace

ModelMetrics::ModelMetrics(std::string model, SeriesBudget& budget)
    : model_(std::move(model)),
      budget_(budget),
      declare_(registry_, {{"model", model_}}),
      of_policy_(registry_, {{"model", model_}}),
      labels_(budget, of_policy_),
      requests_(declare_),
      steps_(declare_, of_policy_),
      rejected_(declare_),
      info_(declare_.Gauges("epikv_model_info", "Always 1. The labels say what is served.", 1)),
      threads_(declare_.Gauges("epikv_threads", "Threads, by pool.", 1).Add({{"pool", "engine"}})),
      load_(declare_
                .Gauges("epikv_model_load_seconds",
                        "Time to load the model, measure kernels and warm up.", 1)
                .Add({})),
      last_step_(declare_
                     .Gauges("epikv_engine_last_step_timestamp_seconds",
                             "When the engine's newest step ended, in seconds since 1970.", 1)
                     .Add({})),
      step_age_(declare_
                    .Gauges("epikv_engine_step_age_seconds",
                            "How long the step that runs has lasted, if that is a second or more.",
                            1)
                    .Add({})) {
  declare_.Count(FillGauges::kNumSeries);
  for (absl::string_view arm : {kNoArm, kOtherArm}) {
    arms_.emplace(arm, std::make_unique<ArmSeries>(model_, std::string(arm), budget));
  }
}

int64_t ModelMetrics::own_series() const {
  absl::MutexLock lock(&mu_);
  int64_t series = declare_.bound() + of_policy_.bound();
  for (const auto& [name, arm] : arms_) series += arm->own_series();
  return series;
}

ArmSeries& ModelMetrics::Of(const Request& request) {
  const auto known = arms_.find(request.arm);
  if (known != arms_.end()) return *known->second;
  auto arm = std::make_unique<ArmSeries>(model_, request.arm, budget_);
  if (!budget_.Take(arm->own_series())) return *arms_.find(kOtherArm)->second;
  return *arms_.emplace(request.arm, std::move(arm)).first->second;
}

bool ModelMetrics::IsOther(const ArmSeries& arm) const {
  return arms_.find(kOtherArm)->second.get() == &arm;
}

void ModelMetrics::KeepArms(const std::set<std::string, std::less<>>& arms) {
  absl::MutexLock lock(&mu_);
  for (auto it = arms_.begin(); it != arms_.end();) {
    const auto& [name, arm] = *it;
    const std::vector<absl::string_view> parts = absl::StrSplit(name, ',');
    const bool kept = std::all_of(parts.begin(), parts.end(),
                                  [&](absl::string_view part) { return arms.contains(part); });
    if (name == kNoArm || name == kOtherArm || kept) {
      ++it;
      continue;
    }
    budget_.GiveBack(arm->own_series());
    it = arms_.erase(it);
  }
}

absl::StatusOr<std::shared_ptr<ModelMetrics>> ModelMetrics::Create(std::string model,
                                                                   SeriesBudget& budget) {
  std::shared_ptr<ModelMetrics> metrics(new ModelMetrics(std::move(model), budget));
  if (budget.Take(metrics->own_series())) {
    metrics->taken_ = metrics->own_series();
    return metrics;
  }
  const int64_t needed = budget.taken() + metrics->own_series();
  return absl::ResourceExhaustedError(absl::StrCat(
      "/metrics would hold ", needed, " series with model '", metrics->model_,
      "', and --metrics_max_series allows ", budget.limit(), "; raise it to at least ", needed));
}

ModelMetrics::~ModelMetrics() {
  KeepArms({});
  budget_.GiveBack(taken_);
}

void ModelMetrics::Describe(const EngineFacts& facts) {
  if (described_ != nullptr) info_.Remove(described_);
  described_ = &info_.Add({{"architecture", facts.architecture},
                           {"dtype", facts.dtype},
                           {"weights", facts.weights},
                           {"decode_kernel", facts.decode_kernel}});
  described_->Set(1);
  threads_.Set(static_cast<double>(facts.threads));
  load_.Set(Seconds(facts.load));
}

EngineLoad ModelMetrics::Load() const {
  absl::MutexLock lock(&mu_);
  if (engines_.empty()) return {};
  const EngineMetrics& engine = *engines_.back();
  const absl::Time now = SteadyNow();
  return {.last = engine.fill_.last,
          .prompt_tokens_per_second = engine.prompt_tokens_.At(now),
          .output_tokens_per_second = engine.output_tokens_.At(now),
          .kv_reserved_ratio = engine.reserved_ratio_.At(now)};
}

std::vector<prometheus::MetricFamily> ModelMetrics::Collect() const {
  std::vector<prometheus::MetricFamily> families = registry_.Collect();
  FillGauges gauges;
  {
    absl::MutexLock lock(&mu_);
    for (const EngineMetrics* engine : engines_) gauges.Add(engine->fill_);
    for (const auto& [name, arm] : arms_) {
      std::vector<prometheus::MetricFamily> of_arm = arm->Collect();
      families.insert(families.end(), std::make_move_iterator(of_arm.begin()),
                      std::make_move_iterator(of_arm.end()));
    }
  }
  std::vector<prometheus::MetricFamily> fill = gauges.Families(model_);
  families.insert(families.end(), std::make_move_iterator(fill.begin()),
                  std::make_move_iterator(fill.end()));
  return families;
}

EngineMetrics::EngineMetrics(std::shared_ptr<ModelMetrics> model, const EngineFacts& facts)
    : model_(std::move(model)),
      facts_(facts),
      fill_{.last = {.kv_capacity_bytes = facts.kv_capacity_bytes,
                     .tier_capacity_bytes = facts.tier_capacity_bytes},
            .weight_bytes = facts.weight_bytes,
            .scratch_bytes = facts.scratch_bytes,
            .constraint_bytes = facts.constraint_bytes,
            .max_running_requests = facts.max_running_requests} {
  absl::MutexLock lock(&model_->mu_);
  model_->Describe(facts_);
  model_->engines_.push_back(this);
}

EngineMetrics::~EngineMetrics() {
  absl::MutexLock lock(&model_->mu_);
  std::erase(model_->engines_, this);
  // It may never have served: then the one that does is described again.
  if (!model_->engines_.empty()) model_->Describe(model_->engines_.back()->facts_);
}

void EngineMetrics::OnAdmitted(const Request& request, absl::Duration queued, int64_t cached) {
  absl::MutexLock lock(&model_->mu_);
  model_->Of(request).OnAdmitted(request, queued);
  model_->requests_.OnAdmitted(request, cached);
}

void EngineMetrics::OnStep(const StepStats& step) {
  absl::MutexLock lock(&model_->mu_);
  fill_.last = step;
  fill_.peak_used_bytes = std::max(fill_.peak_used_bytes, step.kv_used_bytes);
  if (step.kv_capacity_bytes > 0) {
    reserved_ratio_.Set(
        static_cast<double>(step.kv_reserved_bytes) / static_cast<double>(step.kv_capacity_bytes),
        SteadyNow());
  }
  if (step.sequences == 0) return;
  model_->steps_.Add(step, before_);
  model_->last_step_.Set(absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
  prompt_tokens_.Add(static_cast<double>(step.prefill_tokens), before_.end);
  output_tokens_.Add(static_cast<double>(step.decode_tokens + first_tokens_), before_.end);
  first_tokens_ = 0;
}

void EngineMetrics::OnFirstToken(const Request& request, absl::Duration since_arrival) {
  absl::MutexLock lock(&model_->mu_);
  model_->Of(request).OnFirstToken(request, since_arrival);
  ++first_tokens_;
}

void EngineMetrics::OnToken(const Request& request, absl::Duration since_last) {
  absl::MutexLock lock(&model_->mu_);
  model_->Of(request).OnToken(request, since_last);
}

void EngineMetrics::OnEvicted(const EvictedStats& evicted) {
  absl::MutexLock lock(&model_->mu_);
  model_->steps_.AddRound(model_->labels_.Of(evicted.request.spec->name), evicted.time);
  model_->Of(evicted.request).OnEvicted(evicted, facts_.kv);
}

void EngineMetrics::OnFinished(const Request& request, const Finished& finished) {
  absl::MutexLock lock(&model_->mu_);
  ArmSeries& arm = model_->Of(request);
  if (!arm.Knows(request) || model_->IsOther(arm)) model_->requests_.OnFolded();
  arm.OnFinished(request, finished, facts_.kv);
  model_->requests_.OnFinished(finished);
}

std::vector<prometheus::MetricFamily> MergedByName(std::vector<prometheus::MetricFamily> families) {
  std::vector<prometheus::MetricFamily> merged;
  std::map<std::string, size_t> places;
  for (prometheus::MetricFamily& family : families) {
    const auto [place, fresh] = places.emplace(family.name, merged.size());
    if (fresh) {
      merged.push_back(std::move(family));
      continue;
    }
    auto& metrics = merged[place->second].metric;
    metrics.insert(metrics.end(), std::make_move_iterator(family.metric.begin()),
                   std::make_move_iterator(family.metric.end()));
  }
  return merged;
}

}  // namespace epikv
