#include "policies/residual_layers.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "policies/epikv/flat_score.h"

namespace epikv {
namespace {

const std::map<std::string, ParamValue>* Calibration(absl::string_view policy,
                                                     const ModelShape& shape) {
  const auto found = shape.calibrated.find(std::string(policy));
  return found == shape.calibrated.end() ? nullptr : &found->second;
}

void SetMissing(Params& params, absl::string_view name, ParamValue value) {
  if (!params.Has(name)) params.Set(name, std::move(value));
}

}  // namespace

ParamSpec LayerAParam() {
  return {.name = "layer_a",
          .type = ParamType::kInt,
          .max = 4095,
          .help =
              "block (0-based) whose large steps mark a token as worth keeping. Default: the "
              "model's calibration, else at 0.344 of its depth"};
}

ParamSpec LayerBParam() {
  return {.name = "layer_b",
          .type = ParamType::kInt,
          .max = 4095,
          .help =
              "block whose large steps mark a token as worth dropping. Default: the model's "
              "calibration, else at 0.688 of its depth"};
}

ParamSpec SignParam() {
  return {.name = "sign",
          .type = ParamType::kInt,
          .min = -1,
          .max = 1,
          .help = "-1 inverts the score. Default: the model's calibration, else 1"};
}

ParamSpec StepWindowParam() {
  return {.name = "window",
          .type = ParamType::kInt,
          .min = 2,
          .max = 65536,
          .help = "tokens a step is compared with. Default: the model's calibration, else 64"};
}

int64_t BlockAtDepth(double depth, int64_t num_layers) {
  return std::max<int64_t>(0, std::lround(depth * num_layers) - 1);
}

absl::Status CheckBlock(const Params& params, absl::string_view param, const ModelShape& shape) {
  if (params.Int(param) < shape.num_layers) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      param, ": is ", params.Int(param), "; the model's blocks are 0 to ", shape.num_layers - 1));
}

absl::Status CompleteResidualLayers(absl::string_view policy, Params& params,
                                    const ModelShape& shape) {
  // A calibration belongs to its layers: a request that names a layer gets nothing from it.
  const auto* calibration = Calibration(policy, shape);
  if (calibration != nullptr && !params.Has("layer_a") && !params.Has("layer_b")) {
    for (const auto& [name, value] : *calibration) SetMissing(params, name, value);
  }
  const int64_t a = BlockAtDepth(0.344, shape.num_layers);
  SetMissing(params, "layer_a", a);
  SetMissing(params, "layer_b", std::max(a + 1, BlockAtDepth(0.688, shape.num_layers)));
  SetMissing(params, "sign", int64_t{1});
  SetMissing(params, "window", int64_t{64});

  for (absl::string_view name : {"layer_a", "layer_b"}) {
    if (absl::Status status = CheckBlock(params, name, shape); !status.ok()) return status;
  }
  if (params.Int("layer_a") == params.Int("layer_b")) {
    return absl::InvalidArgumentError("layer_a and layer_b must differ");
  }
  if (params.Int("sign") == 0) return absl::InvalidArgumentError("sign: must be 1 or -1");
  return absl::OkStatus();
}

bool Uncalibrated(absl::string_view policy, const Params& params, const ModelShape& shape) {
  const auto* calibration = Calibration(policy, shape);
  if (calibration == nullptr) return true;
  return !std::all_of(calibration->begin(), calibration->end(), [&](const auto& entry) {
    const auto used = params.values().find(entry.first);
    return used != params.values().end() && used->second == entry.second;
  });
}

std::vector<int64_t> ResidualLayers(const Params& params) {
  const int64_t a = params.Int("layer_a"), b = params.Int("layer_b");
  return {std::min(a, b), std::max(a, b)};
}

FrozenPolicy::Scorer FlatScorer(const Params& params) {
  return [moved = StepPair(params), score = FlatScore(params.Int("window"), params.Int("sign"))](
             const SequenceStep& step) mutable { return score.Push(moved.a(step), moved.b(step)); };
}

}  // namespace epikv
