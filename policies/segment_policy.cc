#include "policies/segment_policy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "policies/attention_row.h"
#include "policies/row_stats.h"

namespace epikv {
namespace {

ParamSpec RetainParam(absl::string_view name, int64_t fallback, absl::string_view help) {
  return {.name = name, .type = ParamType::kInt, .fallback = fallback, .max = 65536, .help = help};
}

absl::Status NanError(absl::string_view what, int64_t token) {
  return absl::InternalError(absl::StrCat("the ", what, " of token ", token, " is NaN"));
}

struct FlatState final : PolicyState {
  explicit FlatState(FrozenPolicy::Scorer score) : score(std::move(score)) {}
  std::unique_ptr<PolicyState> Clone() const override { return std::make_unique<FlatState>(*this); }

  FrozenPolicy::Scorer score;
};

}  // namespace

ParamSpec SegmentParam() {
  return {.name = "segment",
          .type = ParamType::kInt,
          .fallback = int64_t{128},
          .min = 1,
          .max = 65536,
          .help = "cached tokens of a segment"};
}
ParamSpec RetainReasoningParam() {
  return RetainParam("retain_r", 64, "tokens kept of a segment of reasoning");
}
ParamSpec RetainExecutionParam() {
  return RetainParam("retain_e", 32, "tokens kept of a segment of execution");
}
ParamSpec RetainTransitionParam() {
  return RetainParam("retain_t", 8, "tokens kept of a segment of transition");
}
ParamSpec ClassifierLayersParam() {
  return {.name = "classifier_layers",
          .type = ParamType::kInt,
          .fallback = int64_t{4},
          .min = 1,
          .max = 4096,
          .help = "last layers whose attention classes a segment"};
}

Segments::Segments(const CacheView& cache, int64_t size) {
  const absl::Span<const int32_t> index = cache.index(0, 0);
  std::vector<int32_t> older;
  for (int32_t slot = 0; slot < std::ssize(index); ++slot) {
    if (index[slot] <= cache.newest() - cache.protection().recent) older.push_back(slot);
  }
  std::sort(older.begin(), older.end(), [&](int32_t a, int32_t b) { return index[a] < index[b]; });
  for (size_t i = 0; i < older.size(); ++i) {
    if (i % size == 0) slots_.emplace_back();
    slots_.back().push_back(older[i]);
  }
}

std::vector<double> Segments::Means(absl::Span<const float> by_slot) const {
  std::vector<double> means;
  for (const std::vector<int32_t>& slots : slots_) {
    double sum = 0;
    for (int32_t slot : slots) sum += by_slot[slot];
    means.push_back(sum / static_cast<double>(slots.size()));
  }
  return means;
}

std::vector<double> Segments::Entropies(absl::Span<const float> by_slot) const {
  std::vector<double> entropies;
  for (const std::vector<int32_t>& slots : slots_) {
    double sum = 0, entropy = 0;
    for (int32_t slot : slots) sum += by_slot[slot];
    for (int32_t slot : slots) {
      const double p = by_slot[slot] / (sum + 1e-9);
      entropy -= p * std::log(p + 1e-12);
    }
    entropies.push_back(entropy);
  }
  return entropies;
}

std::vector<SegmentType> TypesByBounds(const std::vector<double>& statistic, Reasoning reasoning,
                                       double low, double high) {
  std::vector<SegmentType> types;
  for (double s : statistic) {
    const bool first = reasoning == Reasoning::kLow ? s <= low : s >= high;
    const bool second = reasoning == Reasoning::kLow ? s <= high : s >= low;
    types.push_back(first    ? SegmentType::kReasoning
                    : second ? SegmentType::kExecution
                             : SegmentType::kTransition);
  }
  return types;
}

absl::StatusOr<std::vector<SegmentType>> TypesByTertiles(const std::vector<double>& statistic,
                                                         Reasoning reasoning) {
  const size_t n = statistic.size();
  for (double s : statistic) {
    if (std::isnan(s)) return absl::InternalError("the statistic of a segment is NaN");
  }
  if (n <= 1) return std::vector<SegmentType>(n, SegmentType::kReasoning);
  std::vector<double> sorted = statistic;
  std::sort(sorted.begin(), sorted.end());
  return TypesByBounds(statistic, reasoning, sorted[n / 3], sorted[2 * n / 3]);
}

SegmentPolicy::SegmentPolicy(const Params& params)
    : segment_(params.Int("segment")),
      retain_r_(params.Int("retain_r")),
      retain_e_(params.Int("retain_e")),
      retain_t_(params.Int("retain_t")),
      reserve_(params.Has("reserve") ? params.Int("reserve") : 0),
      reserve_by_(params.Has("reserve_by") ? params.Choice("reserve_by") : "") {}

std::vector<Eviction> SegmentPolicy::Evict(absl::Span<EvictionTask> tasks) const {
  std::vector<Eviction> evictions;
  evictions.reserve(tasks.size());
  for (const EvictionTask& task : tasks) evictions.push_back(EvictOne(task));
  return evictions;
}

Eviction SegmentPolicy::EvictOne(const EvictionTask& task) const {
  CacheView& cache = task.cache;
  const absl::Span<const int32_t> index = cache.index(0, 0);
  const absl::Span<const float> score = cache.column(0, 0, 0);
  const Segments segments(cache, segment_);
  const absl::StatusOr<std::vector<SegmentType>> types = Classify(task, segments);
  if (!types.ok()) return {.status = types.status()};

  std::vector<bool> keep(index.size());
  int64_t room = std::ssize(index) - cache.excess(0, 0);
  for (size_t slot = 0; slot < keep.size(); ++slot) {
    keep[slot] = cache.protection().Covers(index[slot], cache.newest());
    if (keep[slot]) --room;
    if (!keep[slot] && std::isnan(score[slot])) return {.status = NanError("score", index[slot])};
  }
  for (size_t i = 0; i < segments.slots().size(); ++i) {
    std::vector<int32_t> open;  // newest first
    for (int32_t slot : segments.slots()[i]) {
      if (!keep[slot]) open.push_back(slot);
    }
    std::reverse(open.begin(), open.end());
    std::stable_sort(open.begin(), open.end(),
                     [&](int32_t a, int32_t b) { return score[a] > score[b]; });
    const SegmentType type = (*types)[i];
    const int64_t retained = type == SegmentType::kReasoning   ? retain_r_
                             : type == SegmentType::kExecution ? retain_e_
                                                               : retain_t_;
    const int64_t count = std::min({retained, static_cast<int64_t>(open.size()), room});
    for (int64_t j = 0; j < count; ++j) keep[open[j]] = true;
    room -= count;
  }
  if (reserve_ > 0) {
    if (absl::Status status = SwapInReserve(cache, score, segments, keep); !status.ok()) {
      return {.status = status};
    }
  }
  Eviction eviction{.victims = {{}}};
  for (size_t slot = 0; slot < keep.size(); ++slot) {
    if (!keep[slot]) eviction.victims[0].push_back(index[slot]);
  }
  return eviction;
}

absl::Status SegmentPolicy::SwapInReserve(const CacheView& cache, absl::Span<const float> score,
                                          const Segments& segments, std::vector<bool>& keep) const {
  const absl::Span<const int32_t> index = cache.index(0, 0);
  const at::Tensor stat = MeanRowStat(cache, RowKind::kValue, reserve_by_);
  const float* value = stat.const_data_ptr<float>();
  std::vector<int32_t> in, out;
  for (const std::vector<int32_t>& slots : segments.slots()) {
    for (int32_t slot : slots) {
      if (cache.protection().Covers(index[slot], cache.newest())) continue;
      if (std::isnan(value[slot])) return NanError("value statistic", index[slot]);
      (keep[slot] ? out : in).push_back(slot);
    }
  }
  // `in` and `out` are oldest first: among equals the newer comes in, and the older goes.
  std::reverse(in.begin(), in.end());
  std::stable_sort(in.begin(), in.end(), [&](int32_t a, int32_t b) { return value[a] > value[b]; });
  std::stable_sort(out.begin(), out.end(),
                   [&](int32_t a, int32_t b) { return score[a] < score[b]; });
  const int64_t swaps = std::min({reserve_, std::ssize(in), std::ssize(out)});
  for (int64_t i = 0; i < swaps; ++i) {
    keep[in[i]] = true;
    keep[out[i]] = false;
  }
  return absl::OkStatus();
}

std::vector<int64_t> ClassifierLayers(const Params& params, const ModelShape& shape) {
  const int64_t count = std::min(params.Int("classifier_layers"), shape.num_layers);
  std::vector<int64_t> layers(count);
  std::iota(layers.begin(), layers.end(), shape.num_layers - count);
  return layers;
}

void ObserveLastLayers(SequenceStep& step, int64_t num_layers, int64_t column) {
  const int64_t first = std::max<int64_t>(0, step.cache.num_layers() - num_layers);
  const std::vector<float> mean = MeanAttention(*step.signals.attention, step.cache, first);
  std::copy(mean.begin(), mean.end(), step.cache.column(column, 0, 0).begin());
}

std::unique_ptr<PolicyState> FlatSegmentPolicy::NewState(const SequenceInfo&) const {
  return std::make_unique<FlatState>(fresh_);
}

void FlatSegmentPolicy::Observe(absl::Span<SequenceStep> steps) const {
  for (SequenceStep& step : steps) {
    const absl::Span<float> score = step.cache.column(0, 0, 0);
    if (step.phase == Phase::kPrefill) {
      const absl::Span<const int32_t> index = step.cache.index(0, 0);
      for (size_t slot = 0; slot < score.size(); ++slot) {
        if (index[slot] >= step.first) score[slot] = -std::numeric_limits<float>::infinity();
      }
    } else {
      score[SlotOf(step.cache, step.first)] = static_cast<FlatState*>(step.state)->score(step);
    }
  }
}

}  // namespace epikv
