#include "policies/row_stats.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "policies/epikv/flat_score.h"
#include "policies/frozen_policy.h"

namespace epikv {
namespace {

at::Tensor Rows(const CacheView& cache, RowKind kind, int64_t layer, int64_t head) {
  return kind == RowKind::kKey ? cache.keys(layer, head) : cache.values(layer, head);
}

}  // namespace

at::Tensor RowStat(const at::Tensor& rows, const std::string& stat) {
  const at::Tensor x = rows.to(at::kFloat);
  if (stat == "range") return x.amax(-1) - x.amin(-1);
  if (stat == "variance") return x.var(-1);
  return x.norm(2, {-1});
}

int64_t SlotOf(const CacheView& cache, int64_t token) {
  const absl::Span<const int32_t> index = cache.index(0, 0);
  return std::find(index.begin(), index.end(), static_cast<int32_t>(token)) - index.begin();
}

float NewestRowStat(const CacheView& cache, RowKind kind, const std::string& stat) {
  const int64_t slots[] = {SlotOf(cache, cache.newest())};
  const at::Tensor rows = kind == RowKind::kKey ? cache.keys_of(slots) : cache.values_of(slots);
  return RowStat(rows, stat).mean().item<float>();
}

at::Tensor MeanRowStat(const CacheView& cache, RowKind kind, const std::string& stat) {
  at::Tensor sum = at::zeros(static_cast<int64_t>(cache.index(0, 0).size()));
  for (int64_t layer = 0; layer < cache.num_layers(); ++layer) {
    for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
      sum += RowStat(Rows(cache, kind, layer, head), stat);
    }
  }
  return sum / static_cast<double>(cache.num_layers() * cache.num_kv_heads());
}

ParamSpec RowWindowParam() {
  return {.name = "window",
          .type = ParamType::kInt,
          .fallback = int64_t{64},
          .min = 1,
          .max = 65536,
          .help = "newest tokens over which a token's variance is averaged"};
}

PolicyTraits RowVarianceTraits(const Params& params, Signal rows) {
  return {
      .signals = rows,
      .slack = params.Int("slack"),
      .state_bytes_per_token = FrozenPolicy::kStateBytesPerToken,
      .state_bytes = static_cast<int64_t>(sizeof(float)) * params.Int("window"),
  };
}

std::shared_ptr<const Policy> MakeRowVariance(const Params& params, RowKind kind) {
  return std::make_shared<FrozenPolicy>(
      [kind, mean = RollingMean(params.Int("window"))](const SequenceStep& step) mutable {
        return static_cast<float>(mean.Push(NewestRowStat(step.cache, kind, "variance")));
      });
}

ParamSpec ReserveParam() {
  return {
      .name = "reserve",
      .type = ParamType::kInt,
      .fallback = int64_t{0},
      .max = 64,
      .help = "tokens with the largest values that are kept for them, instead of as many others"};
}

ParamSpec ReserveByParam() {
  return {.name = "reserve_by",
          .type = ParamType::kChoice,
          .fallback = std::string("range"),
          .choices = kRowStats,
          .help =
              "what is large, averaged over all lanes: a value's largest channel less its "
              "smallest, its variance over channels, or its L2 norm"};
}

SignalSet ReserveSignals(const Params& params) {
  return params.Int("reserve") > 0 ? SignalSet(Signal::kValues) : SignalSet();
}

}  // namespace epikv
