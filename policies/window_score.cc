#include "policies/window_score.h"

#include <ATen/ATen.h>

#include "absl/strings/str_cat.h"
#include "policies/recipe.h"

namespace epikv {

ParamSpec WindowParam(int64_t fallback) {
  return {.name = "window",
          .type = ParamType::kInt,
          .fallback = fallback,
          .min = 1,
          .max = 1024,
          .help = "newest tokens whose queries are asked"};
}

ParamSpec PoolKernelParam(int64_t fallback) {
  return {.name = "kernel",
          .type = ParamType::kInt,
          .fallback = fallback,
          .min = 1,
          .max = 1023,
          .help = "neighbours, the token included, over which scores are pooled; odd"};
}

ParamSpec PoolModeParam(absl::string_view fallback) {
  static constexpr absl::string_view kModes[] = {"avg", "max"};
  return {.name = "pooling",
          .type = ParamType::kChoice,
          .fallback = std::string(fallback),
          .choices = kModes,
          .help = "how"};
}

ParamSpec GqaParam(absl::string_view fallback) {
  static constexpr absl::string_view kModes[] = {"mean", "max", "sum"};
  return {.name = "gqa",
          .type = ParamType::kChoice,
          .fallback = std::string(fallback),
          .choices = kModes,
          .help = "how the query heads of a KV head become one score"};
}

absl::Status CheckWindow(const Params& params) {
  if (params.Int("kernel") % 2 == 1) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("kernel: must be odd, is ", params.Int("kernel")));
}

PolicyTraits WindowTraits(const Params& params, SignalSet more) {
  PolicyTraits traits{.granularity = Granularity::kHead,
                      .signals = Signal::kKeys | Signal::kQueries | more,
                      .window = params.Int("window"),
                      .prompt = PromptEviction::kAtEnd,
                      .slack = params.Int("slack"),
                      .floats_per_token = kFloatsOfQuery * params.Int("window"),
                      .published = {.recent = params.Int("window")}};
  AddRecipe(params, traits);
  return traits;
}

at::Tensor ReduceGroup(const at::Tensor& x, const std::string& mode) {
  if (mode == "max") return std::get<0>(x.max(0));
  return mode == "sum" ? x.sum(0) : x.mean(0);
}

at::Tensor PoolNeighbours(const at::Tensor& x, int64_t kernel, const std::string& mode) {
  if (kernel == 1 || x.size(-1) == 0) return x;
  if (mode == "max") return at::max_pool1d(x, kernel, 1, kernel / 2);
  constexpr int64_t kMostShifts = 31;
  if (kernel > kMostShifts) return at::avg_pool1d(x, kernel, 1, kernel / 2);
  // As many vectorised sums are faster than avg_pool1d, which is not.
  const at::Tensor padded = at::constant_pad_nd(x, {kernel / 2, kernel / 2});
  at::Tensor sum = padded.narrow(-1, 0, x.size(-1)).clone();
  for (int64_t i = 1; i < kernel; ++i) sum.add_(padded.narrow(-1, i, x.size(-1)));
  return sum.div_(static_cast<double>(kernel));
}

at::Tensor BeforeWindow(Lane& lane, const at::Tensor& x) {
  const int64_t before = x.size(-1) - lane.window_tokens();
  return x.index_select(-1, lane.by_birth().narrow(0, 0, before));
}

at::Tensor WithWindow(Lane& lane, const at::Tensor& score) {
  const int64_t n = lane.index().size(0), before = score.size(0);
  at::Tensor all = before == 0 ? at::zeros(n) : score.max().expand(n).clone();
  all.narrow(0, 0, before).copy_(score);
  lane.set_unscored(lane.by_birth().narrow(0, before, n - before));
  return lane.ToSlots(all);
}

at::Tensor ScoreBeforeWindow(Lane& lane, const at::Tensor& by_head, const Params& params) {
  const at::Tensor seen = BeforeWindow(lane, by_head);  // [group, before]
  return WithWindow(
      lane, ReduceGroup(PoolNeighbours(seen, params.Int("kernel"), params.Choice("pooling")),
                        params.Choice("gqa")));
}

at::Tensor WindowScore(Lane& lane, const at::Tensor& attention, const Params& params) {
  return ScoreBeforeWindow(lane, attention.mean(1), params);
}

}  // namespace epikv
