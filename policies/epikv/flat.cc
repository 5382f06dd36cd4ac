#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <queue>
#include <utility>

#include "absl/strings/str_cat.h"
#include "policies/epikv/flat_score.h"
#include "policies/policy.h"

// EpiKV-Flat. Every decode token gets one score at birth, sign x (Z(step_a) - Z(step_b)), where
// step_l is how far the residual stream after block l moved from the token before. Kept are the
// protected tokens and the highest scores. Since scores never change and the recent window only
// moves forward, that is a heap: a token enters it when it leaves the recent window, the lowest
// leave the cache. O(log budget) a token.

namespace epikv {
namespace {

constexpr int64_t kWindow = 64;

const ParamSpec kParams[] = {
    {.name = "layer_a",
     .type = ParamType::kInt,
     .max = 4095,
     .help = "block (0-based) whose large steps mark a token as worth keeping. Default: the "
             "model's calibration, else at 0.344 of its depth"},
    {.name = "layer_b",
     .type = ParamType::kInt,
     .max = 4095,
     .help = "block whose large steps mark a token as worth dropping. Default: the model's "
             "calibration, else at 0.688 of its depth"},
    {.name = "sign",
     .type = ParamType::kInt,
     .min = -1,
     .max = 1,
     .help = "-1 inverts the score. Default: the model's calibration, else 1"},
    {.name = "window",
     .type = ParamType::kInt,
     .min = 2,
     .max = 65536,
     .help = "tokens a step is compared with. Default: the model's calibration, else 64"},
    SlackParam(0),
};

// Block at `depth` of the model: 0.344 and 0.688 are blocks 10 and 21 of the published 32.
int64_t AtDepth(double depth, int64_t num_layers) {
  return std::max<int64_t>(0, std::lround(depth * num_layers) - 1);
}

const std::map<std::string, ParamValue>* Calibration(const ModelShape& shape) {
  const auto found = shape.calibrated.find("epikv_flat");
  return found == shape.calibrated.end() ? nullptr : &found->second;
}

void SetMissing(Params& params, absl::string_view name, ParamValue value) {
  if (!params.Has(name)) params.Set(name, std::move(value));
}

absl::Status Complete(Params& params, const ModelShape& shape) {
  // A calibration belongs to its layers: a request that names a layer gets nothing from it.
  const auto* calibration = Calibration(shape);
  if (calibration != nullptr && !params.Has("layer_a") && !params.Has("layer_b")) {
    for (const auto& [name, value] : *calibration) SetMissing(params, name, value);
  }
  const int64_t a = AtDepth(0.344, shape.num_layers);
  SetMissing(params, "layer_a", a);
  SetMissing(params, "layer_b", std::max(a + 1, AtDepth(0.688, shape.num_layers)));
  SetMissing(params, "sign", int64_t{1});
  SetMissing(params, "window", kWindow);

  for (absl::string_view name : {"layer_a", "layer_b"}) {
    if (params.Int(name) >= shape.num_layers) {
      return absl::InvalidArgumentError(absl::StrCat(
          name, " is ", params.Int(name), "; the model's blocks are 0 to ", shape.num_layers - 1));
    }
  }
  if (params.Int("layer_a") == params.Int("layer_b")) {
    return absl::InvalidArgumentError("layer_a and layer_b must differ");
  }
  if (params.Int("sign") == 0) return absl::InvalidArgumentError("sign must be 1 or -1");
  return absl::OkStatus();
}

bool Uncalibrated(const Params& params, const ModelShape& shape) {
  const auto* calibration = Calibration(shape);
  if (calibration == nullptr) return true;
  return !std::all_of(calibration->begin(), calibration->end(), [&](const auto& entry) {
    const auto used = params.values().find(entry.first);
    return used != params.values().end() && used->second == entry.second;
  });
}

// (score, index). Pairs order as victims do: the lowest score first, among equals the older.
using Scored = std::pair<float, int32_t>;

struct FlatState final : PolicyState {
  FlatState(int64_t window, int64_t sign, Protection protection)
      : score(window, sign), protection(std::move(protection)) {}
  std::unique_ptr<PolicyState> Clone() const override { return std::make_unique<FlatState>(*this); }

  FlatScore score;
  const Protection protection;
  std::deque<float> recent;  // scores of the tokens in the recent window, oldest first
  int64_t first_recent = 0;  // index of the oldest of them
  std::priority_queue<Scored, std::vector<Scored>, std::greater<>> older;  // without protected ones
  absl::Status status;
};

class Flat final : public Policy {
 public:
  explicit Flat(const Params& params)
      : window_(params.Int("window")),
        sign_(params.Int("sign")),
        a_first_(params.Int("layer_a") < params.Int("layer_b")) {}

  std::unique_ptr<PolicyState> NewState(const SequenceInfo& info) const override {
    return std::make_unique<FlatState>(window_, sign_, info.protection);
  }

  void Observe(absl::Span<SequenceStep> steps) const override {
    for (SequenceStep& step : steps) {
      FlatState& state = *static_cast<FlatState*>(step.state);
      if (step.phase == Phase::kPrefill) {
        // The prompt is never scored: what of it is unprotected goes first.
        state.recent.insert(state.recent.end(), step.count,
                            -std::numeric_limits<float>::infinity());
      } else {
        const absl::Span<const float> moved = step.signals.residual_step;  // [2], by layer
        state.recent.push_back(state.score.Push(moved[a_first_ ? 0 : 1], moved[a_first_ ? 1 : 0]));
      }
      LeaveRecent(step.first + step.count - 1, state);
    }
  }

  std::vector<Eviction> Evict(absl::Span<EvictionTask> tasks) const override {
    std::vector<Eviction> evictions;
    evictions.reserve(tasks.size());
    for (const EvictionTask& task : tasks) {
      evictions.push_back(PopLowest(task.cache.excess(0, 0), *static_cast<FlatState*>(task.state)));
    }
    return evictions;
  }

 private:
  static void LeaveRecent(int64_t newest, FlatState& state) {
    for (; state.first_recent <= newest - state.protection.recent; ++state.first_recent) {
      const float score = state.recent.front();
      state.recent.pop_front();
      if (state.protection.CoversForever(state.first_recent)) continue;
      if (std::isnan(score)) {
        state.status.Update(absl::InternalError(
            absl::StrCat("the score of token ", state.first_recent, " is NaN")));
        continue;
      }
      state.older.emplace(score, static_cast<int32_t>(state.first_recent));
    }
  }

  static Eviction PopLowest(int64_t count, FlatState& state) {
    if (!state.status.ok()) return {.status = state.status};
    if (static_cast<int64_t>(state.older.size()) < count) {
      return {.status = absl::InternalError(absl::StrCat(count, " tokens must go but only ",
                                                         state.older.size(), " are unprotected"))};
    }
    Eviction eviction{.victims = {{}}};
    for (int64_t i = 0; i < count; ++i) {
      eviction.victims[0].push_back(state.older.top().second);
      state.older.pop();
    }
    return eviction;
  }

  const int64_t window_, sign_;
  const bool a_first_;  // layer_a is the first of PolicyTraits::residual_layers
};

PolicyTraits Traits(const Params& params, const ModelShape& shape) {
  const int64_t a = params.Int("layer_a"), b = params.Int("layer_b");
  return {
      .signals = Signal::kResidualStep,
      .residual_layers = {std::min(a, b), std::max(a, b)},
      .slack = params.Int("slack"),
      .state_bytes_per_token = sizeof(Scored),
      .state_bytes = static_cast<int64_t>(2 * sizeof(float)) * params.Int("window"),
      .uncalibrated = Uncalibrated(params, shape),
  };
}

}  // namespace

extern constinit const PolicySpec kEpikvFlat{
    .name = "epikv_flat",
    .summary =
        "drops the tokens over which an early block's residual moved least and a late "
        "block's most, against the last 64",
    .paper = "arXiv 2606.26472, EpiKV-Flat",
    .evidence = "golden: stevenkolawole/epiphany-kv-cache d424208 `DetrendendHSVarianceEviction`",
    .params = kParams,
    .complete = &Complete,
    .traits = &Traits,
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Flat>(params);
    },
};

}  // namespace epikv
